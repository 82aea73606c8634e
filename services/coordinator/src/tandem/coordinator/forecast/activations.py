"""Activations and temporary buffers of a trainer rank on a GPU, by closed forms.

Each term is a tensor that autograd keeps for the backward pass, or one that exists beside those. They are read from the
code that is executed: for DTensor, Transformers' layers under FSDP2; for Megatron-Core, its layers without Transformer
Engine, whose fused kernels keep less. The forms are those of Korthikanti et al. 2022 (arXiv:2205.05198, sections 4 and
5), with grouped heads, gated feed-forward layers, RMSNorm, and attention that keeps no scores (Dao 2023,
arXiv:2307.08691). Tokens go to experts evenly.

Shapes: ``N`` tokens of a micro-batch on this rank, ``M`` of them where sequence parallelism divides them; ``R`` copies
of tokens at this rank's experts, ``K`` tokens that are scored.
"""

from __future__ import annotations

import math
import re

import msgspec

from tandem.config import Config
from tandem.coordinator.forecast.media import make_measure
from tandem.coordinator.forecast.sides import ForecastSide
from tandem.refit.adapters.deployment import list_megatron_stages
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.geometry import DecoderGeometry, LatentAttention
from tandem.refit.adapters.megatron import Megatron

_LOGITS = 2**26
"""Most logits at once, as in `tandem.trainer.scoring`."""
_LAYER = re.compile(r"model\.(?:layers|.*\.blocks|.*\.encoder\.layers)\.\d+(?=\.)")
"""Names of what FSDP2 gathers together: a layer, of the tower too."""
_NO_FORMS = ("gpt_oss",)
"""Families with layers of other shapes than these."""


class PassMemory(msgspec.Struct, frozen=True):
    """The most that passes of one kind take, in bytes."""

    name: str
    activations: float
    """Tensors that are kept for the backward pass."""
    buffers: float
    """Logits, gathered parameters, gradients before they are reduced, and what the present layer computes."""
    media: float = 0.0
    """Those that are kept of what the model takes besides tokens."""


def passes(config: Config, trainers: ForecastSide, rank: int) -> list[PassMemory]:
    """Return the passes of a step on a rank; none if the model's shapes are unknown."""
    geometry, deployment = trainers.model.as_text.geometry, trainers.deployment
    if geometry is None or geometry.model_type in _NO_FORMS:
        return []
    is_megatron = isinstance(deployment, Megatron)
    rank_of = _MegatronRank if is_megatron else _DTensorRank
    estimator = rank_of(config, trainers, geometry, rank)
    scored = config.scored_by(config.num_optimizer_steps)
    return [*([estimator.scoring()] if scored else []), estimator.training()]


class _Rank:
    """One rank's part of each layer."""

    def __init__(self, config: Config, trainers: ForecastSide, geometry: DecoderGeometry, rank: int) -> None:
        self.policy, self.geometry, self.model = config.policy, geometry, trainers.model.as_text
        self.item = 4 if config.policy.precision == "float32" else 2
        """Bytes of an element in the passes."""
        self.measure_media = make_measure(config, trainers.model)
        self.trains_all = config.policy.adapters is None
        self.has_head_norms = self.model.has_head_norms
        self.num_sequences = config.sequences_per_sample
        shares = config.data_parallel_size
        self.num_trained = -(-config.policy.train_global_batch_size // shares)
        self.num_scored = max(self.num_trained, -(-config.units_per_step // shares))
        """Samples of this rank in an optimizer step, and in a step."""
        self.num_micro_batches = -(-self.num_trained // config.policy.train_micro_batch_size)
        longest, generation = config.policy.max_total_sequence_length, config.policy.generation
        rolls_out = config.declaration.rolls_out
        self.share_scored = min(1.0, generation.max_new_tokens / longest) if rolls_out else 1.0
        """Share of the tokens that are scored."""
        self.num_outputs = 1 if self.model.has_scalar_head else geometry.vocabulary_size
        """Numbers that the head gives for each token."""
        self.place(trainers.deployment, rank)

    tp, cp, cuts_sequences = 1, 1, False

    def place(self, deployment: object, rank: int) -> None:
        """Note what the deployment puts on this rank."""
        raise NotImplementedError

    def tokens(self, *, scoring: bool) -> float:
        """Return ``N``."""
        policy, by_tokens = self.policy, None
        for section in (policy.sequence_packing, policy.dynamic_batching):
            if section.enabled:
                by_tokens = section.logprob_mb_tokens if scoring else section.train_mb_tokens
        size, max_rows = policy.train_micro_batch_size, self.num_trained
        if scoring:
            size, max_rows = policy.logprob_batch_size, self.num_scored
        rows = min(size, max_rows) * self.num_sequences
        return (by_tokens or rows * policy.max_total_sequence_length) / self.cp

    def divided(self, num_tokens: float) -> float:
        """Return ``M`` for ``N``."""
        return num_tokens / self.tp if self.cuts_sequences else num_tokens

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer has routed experts."""
        return self.geometry.experts is not None and layer in self.geometry.experts.layers

    def width(self, layer: int) -> float:
        """Return this rank's part of the intermediate size of a layer's dense network, or of its shared experts."""
        experts = self.geometry.experts
        if experts is not None and self.has_experts(layer):
            return experts.shared_size / self.tp
        return self.geometry.intermediate_size / self.tp

    def copies(self, num_tokens: float) -> float:
        """Return ``R``."""
        assert self.geometry.experts is not None, "asked only of layers with experts"
        return self.divided(num_tokens) * self.geometry.experts.num_chosen

    def measure_kept(self, layer: int, num_tokens: float) -> float:
        """Return what a layer keeps for its backward pass, its input included."""
        num_bytes = self.norms(num_tokens) + self.attention(num_tokens)
        num_bytes += self.num_products * self.item * num_tokens * self.width(layer)
        experts = self.geometry.experts
        if experts is not None and self.has_experts(layer):
            # The sorted copies, the products, and one more with the router's weights; then scores and maps.
            width = experts.intermediate_size / self.expert_tp
            num_bytes += (
                self.item * self.copies(num_tokens) * (self.geometry.hidden_size + (self.num_products + 1) * width)
            )
            num_bytes += 10 * self.divided(num_tokens) * experts.num_experts
        return num_bytes

    num_products, expert_tp = 4, 1

    def norms(self, num_tokens: float) -> float:
        """Return what the norms before both halves of a layer keep."""
        raise NotImplementedError

    def attention(self, num_tokens: float) -> float:
        """Return what attention keeps."""
        item, tp, sizes = self.item, self.tp, self.geometry.attention
        if isinstance(sizes, LatentAttention):
            # Both sides of the norms of what is compressed, then queries, keys, values, and the output.
            compressed = 2 * (sizes.query_rank or 0) + 2 * sizes.kv_rank + sizes.rope_dim
            heads = sizes.num_heads / tp * (2 * (sizes.nope_dim + sizes.rope_dim) + 2 * sizes.value_dim)
            return num_tokens * (item * (compressed + heads) + 4 * sizes.num_heads / tp)
        queries, keys = (n / tp * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads))
        bytes_per_token = self.projections(queries, keys) + item * (
            2 * queries + keys
        )  # turned queries and keys, and the output
        return num_tokens * (bytes_per_token + 4 * sizes.num_heads / tp)

    def projections(self, queries: float, keys: float) -> float:
        """Return the bytes for each token of projections that attention keeps, beside what is rotated."""
        raise NotImplementedError

    def working(self, layer: int, num_tokens: float) -> float:
        """Return what the computation of a layer holds beside what is kept, forward or backward."""
        num_bytes = 4 * self.item * num_tokens * self.width(layer)  # gradients of the network's products
        if self.has_experts(layer):
            # Copies before and after they are exchanged, the experts' results, and these in one tensor.
            num_bytes += 4 * self.item * self.copies(num_tokens) * self.geometry.hidden_size
        return num_bytes

    def scores(self, num_tokens: float, *, trains: bool) -> float:
        """Return what scoring takes: logits in chunks, and the output layer's whole gradient."""
        rows, hidden = self.num_output_rows, self.geometry.hidden_size
        num_scored = num_tokens * self.share_scored
        num_logits = min(num_scored * rows, _LOGITS)
        forward = 8 * num_logits  # in float32, and below their largest
        if not trains:
            return forward
        backward = (4 + self.item) * num_logits + (4 + self.item) * num_scored * hidden
        return max(forward, backward + (self.item * rows * hidden if self.trains_all else 0))

    num_output_rows = 0.0

    def measure_inference(self, layers: list[int], num_tokens: float) -> float:
        """Return what a pass without gradients takes."""
        hidden = self.geometry.hidden_size

        def taken(layer: int) -> float:
            num_bytes = 4 * self.item * self.divided(num_tokens) * hidden + 3 * self.item * num_tokens * self.width(
                layer
            )
            if self.has_experts(layer):
                num_bytes += 5 * self.item * self.copies(num_tokens) * hidden
            return num_bytes

        return max(*map(taken, layers), self.scores(num_tokens, trains=False))

    def scoring(self) -> PassMemory:
        """Return the passes for log-probabilities."""
        raise NotImplementedError

    def training(self) -> PassMemory:
        """Return the forward and backward passes."""
        raise NotImplementedError


class _DTensorRank(_Rank):
    """FSDP2: a layer's parameters are gathered before it, its gradients reduced in float32 after it."""

    def place(self, deployment: object, rank: int) -> None:
        assert isinstance(deployment, DTensor)
        settings = self.policy.dtensor_cfg
        self.tp, self.cp = deployment.tensor, settings.context_parallel_size
        self.cuts_sequences = settings.sequence_parallel
        self.num_output_rows = self.num_outputs if self.model.has_scalar_head else self.num_outputs / self.tp
        self.layers = list(range(self.geometry.num_layers))
        sizes = dict.fromkeys(("", *(f"model.layers.{layer}" for layer in self.layers)), 0.0)
        for tensor in self.model.tensors:
            layer = _LAYER.match(tensor.name)
            key = layer[0] if layer else ""
            shares = deployment.expert if ".experts." in tensor.name else self.tp
            sizes[key] = sizes.get(key, 0.0) + math.prod(tensor.shape) / shares
        if deployment.num_ranks > 1:
            self.root, self.largest = sizes.pop(""), max(sizes.values())
        else:  # a single rank gathers nothing, but keeps what it casts
            self.root, self.largest = sum(sizes.values()) if self.item < 4 and self.trains_all else 0.0, 0.0
        """Elements of what is gathered all along, and of the largest layer."""
        self.begun = (2 if self.largest else 1) * self.item * self.root
        """Bytes gathered at the beginning: one tensor, and those that it is copied to."""

    def norms(self, num_tokens: float) -> float:
        # The input in float32; normalised, for the gradient of the norm's weight; and the result.
        of_norm = 4 + (2 if self.trains_all else 1) * self.item
        num_norms = 4 if self.geometry.model_type == "gemma3_text" else 2
        return num_norms * of_norm * self.divided(num_tokens) * self.geometry.hidden_size

    def mtp(self, num_tokens: float) -> float:
        """Return what layers of multi-token prediction keep: they run once for each prediction, and recompute nothing.

        Two norms keep their inputs in float32, and normalised, and the projection their results in one tensor. Then
        come the decoder layer, like the policy's last, and the last norm. Scored states are kept, and their logits
        where these are few.
        """
        if not self.policy.mtp.num_layers:
            return 0.0
        hidden, item = self.geometry.hidden_size, self.item
        around = 2 * (4 + item) + 2 * item + 4 + 2 * item + item * self.share_scored
        of_layer = self.measure_kept(self.layers[-1], num_tokens) + around * num_tokens * hidden
        num_logits = self.share_scored * num_tokens * self.num_output_rows
        return self.policy.mtp.num_layers * (of_layer + (4 * num_logits if num_logits <= _LOGITS else 0))

    def projections(self, queries: float, keys: float) -> float:
        return self.item * keys + ((4 + self.item) * (queries + keys) if self.has_head_norms else 0)

    def scoring(self) -> PassMemory:
        num_bytes = self.item * self.root + self.measure_inference(self.layers, self.tokens(scoring=True))
        return PassMemory("log-probabilities", 0.0, max(num_bytes, self.begun) + 2 * self.item * self.largest)

    def training(self) -> PassMemory:
        num_tokens, item = self.tokens(scoring=False), self.item
        hidden = self.geometry.hidden_size
        recomputes = self.policy.activation_checkpointing_enabled or self.policy.dtensor_cfg.activation_checkpointing
        last = max(self.measure_kept(layer, num_tokens) for layer in self.layers)
        layer_bytes = [
            item * self.divided(num_tokens) * hidden if recomputes else self.measure_kept(layer, num_tokens)
            for layer in self.layers
        ]
        ends = (4 + 2 * item) * num_tokens * hidden + item * num_tokens * self.share_scored * hidden
        work = max(self.working(layer, num_tokens) for layer in self.layers)
        is_reduced = self.trains_all and self.largest > 0
        # The output layer's gradient waits for the root's others. A layer's are there in the type of the passes, those
        # of the one behind it in float32, while the one before it is gathered.
        output = item * self.num_output_rows * hidden if self.trains_all else 0
        reduced = (item + 4) * self.largest if is_reduced else 0
        gathered = item * self.root
        first = gathered + 2 * item * self.largest + self.scores(num_tokens, trains=True)
        then = gathered + 2 * item * self.largest + output + reduced + work + (last if recomputes else -last)
        end = (item + 4) * self.root + reduced if is_reduced else self.begun
        activations = sum(layer_bytes) + ends + self.mtp(num_tokens)
        # Kept activations are gone at the end, when the root's weights are, and its gradients are reduced.
        media = self.measure_media(num_tokens, self.item, recomputes=recomputes)
        buffers = max(first, then, end - activations - media)
        return PassMemory("forward and backward passes", activations, buffers, media)


class _MegatronRank(_Rank):
    """Megatron-Core: parameters and gradients are whole, and a pipeline keeps several micro-batches."""

    num_products = 5
    """The two halves of one product, the activation, the other half plus zero, and their product."""

    def place(self, deployment: object, rank: int) -> None:
        assert isinstance(deployment, Megatron)
        settings, at = self.policy.megatron_cfg, deployment.coordinates(rank)
        self.tp, self.cp, self.expert_tp = deployment.tp, deployment.cp, deployment.expert_tensor_size
        has_experts = self.geometry.experts is not None
        self.cuts_sequences = self.tp > 1 and (settings.sequence_parallel or has_experts)
        ends = deployment.num_layers_in_first_stage, deployment.num_layers_in_last_stage
        pp, vpp = deployment.pp, deployment.vpp
        chunks = list_megatron_stages(self.geometry.num_layers, pp, vpp, *ends)[at.pp]
        self.layers = [layer for chunk in chunks for layer in chunk]
        self.is_first, self.is_last = at.pp == 0, at.pp == pp - 1
        multiple = deployment.vocabulary_divisor * self.tp
        rows = 1 if self.model.has_scalar_head else -(-self.num_outputs // multiple) * multiple / self.tp
        self.num_output_rows = rows if self.is_last else 0.0
        # Of a pipeline's micro-batches those before the first backward pass (Korthikanti et al., section 4.2.3);
        # interleaved, a stage keeps those of single chunks (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
        in_flight = pp - at.pp if vpp == 1 else (2 * (pp - at.pp - 1) + (vpp - 1) * pp + 1) / vpp
        self.in_flight = min(in_flight, self.num_micro_batches)

    def copies(self, num_tokens: float) -> float:
        return super().copies(num_tokens) * self.expert_tp

    def norms(self, num_tokens: float) -> float:
        return 4 * self.item * self.divided(num_tokens) * self.geometry.hidden_size  # inputs and results

    def projections(self, queries: float, keys: float) -> float:
        # All in one tensor, from which queries are copied for a norm of their own.
        return self.item * (queries + 2 * keys + (queries if self.has_head_norms else 0))

    def scoring(self) -> PassMemory:
        num_tokens = self.tokens(scoring=True)
        return PassMemory("log-probabilities", 0.0, self.measure_inference(self.layers, num_tokens))

    def training(self) -> PassMemory:
        num_tokens, settings = self.tokens(scoring=False), self.policy.megatron_cfg
        granularity = settings.forwarded.get("recompute_granularity")
        recomputes = settings.activation_checkpointing or self.policy.activation_checkpointing_enabled
        recomputes = granularity == "full" or (recomputes and granularity is None)
        hidden = self.item * self.divided(num_tokens) * self.geometry.hidden_size
        stage_bytes = sum(hidden if recomputes else self.measure_kept(layer, num_tokens) for layer in self.layers)
        activations = self.in_flight * stage_bytes
        if self.is_last:  # the last norm's input and result, whole, and of scored tokens
            activations += hidden + (1 + self.share_scored) * self.item * num_tokens * self.geometry.hidden_size
        recomputed = [self.measure_kept(layer, num_tokens) if recomputes else 0.0 for layer in self.layers]
        works = [self.working(layer, num_tokens) for layer in self.layers]
        layer = max(more + work for more, work in zip(recomputed, works, strict=True))
        scored = self.scores(num_tokens, trains=True) if self.is_last else 0.0
        num_media = self.in_flight if self.is_first else 0
        media = num_media * self.measure_media(num_tokens, self.item, recomputes=recomputes)
        return PassMemory("forward and backward passes", activations, max(layer, scored) + 2 * hidden, media)
