"""Seconds of decoding steps, passes over packed rows, and refits: rooflines with fitted efficiencies.

A decoding step of an engine is the sum of these, for ``B`` sequences at tensor parallel size ``t``:

- weights: ``max(bytes that are read / (t bandwidth), products of B tokens / (t peak))``. Of ``E`` routed experts, those
  are read that any token goes to: ``E (1 - (1 - k / E) ^ B)`` on average. Narrow slices are read more slowly.
- cache: bytes of the cached tokens over the bandwidth of the ranks that share them.
- exchanges: two all-reduces a layer.
- constants: one a step, and one a sequence.

A pass of a trainer over a micro-batch, on one of its pipeline stages, is the sum of products over the peak, exchanges
between ranks, and a constant a layer. Micro-batches go through ``p`` stages in ``m + p - 1`` turns. Each optimizer step
adds the exchange of gradients and weights. ``scripts/fit_simulation.py`` fitted `EFFICIENCIES`, and says on what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tandem.common.errors import ConfigError
from tandem.config import Config
from tandem.coordinator.forecast.sides import ForecastSide
from tandem.coordinator.forecast.simulation.gpus import GpuRates
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.geometry import DecoderGeometry, LatentAttention
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.layout import ITEM_SIZES

_GB, _TERA = 1e9, 1e12
_BACKWARD = 2
"""Products of a backward pass, as a multiple of those of its forward pass."""


class FittedEfficiencies(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of peaks that are reached, and constants, all fitted to published runs."""

    memory: float
    """Share of the memory's bandwidth in decoding."""
    products: float
    """Share of the peak in training, scoring and prefilling."""
    links: float
    """Share of NVLink's, or the network's, rate within passes."""
    expert_columns: float
    """Columns of an expert's slice at which a decoding step reads it half as fast as a wide one."""
    decode_s: float
    """Constant of a decoding step."""
    sequence_s: float
    """Constant of a decoding step for each of its sequences."""
    hop_s: float
    """Constant of an all-reduce of a decoding step within a node."""
    far_hop_s: float
    """The same between nodes, where no kernel of the engine's own does it."""
    layer_s: float
    """Constant of a layer of a forward pass over a micro-batch."""
    expert_s: float
    """The same of each local expert of a layer."""
    refit_s: float
    """Constant of a refit."""
    refit_links: float
    """Share of a link's rate that a refit reaches."""
    step_s: float
    """Constant of a step: rewards, batches, and what else lies between its phases."""
    shared_s_per_gb: float
    """On shared GPUs, what a step takes to bring a GB of a GPU's optimizer and engine weights out of the way and
    back."""


EFFICIENCIES = FittedEfficiencies(
    memory=0.72,
    products=0.323,
    links=0.462,
    expert_columns=49.2,
    decode_s=0.004,
    sequence_s=2.6e-05,
    hop_s=1.5e-05,
    far_hop_s=0.00025,
    layer_s=0.000385,
    expert_s=0.00013,
    refit_s=0.57,
    refit_links=0.5,
    step_s=3.0,
    shared_s_per_gb=0.25,
)
"""The result of ``scripts/fit_simulation.py --fit``, to three digits."""


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a token in a model, and the sizes of its weights, keys and values."""

    num_parameters: float
    num_dense: float
    """Parameters in products that every token goes through, the output layer's included."""
    num_routed: float
    """Parameters of all routed experts."""
    num_layers: int
    num_expert_layers: int
    hidden: int
    num_experts: int
    """Experts of a layer; 0 if there are none."""
    num_chosen: int
    expert_size: int
    """Intermediate size of an expert."""
    cache_bytes: float
    """Bytes of the keys and values of a token, in bfloat16."""
    num_heads: int
    num_kv_heads: int
    """Shares that keys and values can be cut into."""
    attention_flops: float
    """Operations of a token's attention to one other, in all layers."""
    engine_item: float
    """Bytes of a weight in an engine, on average."""

    @property
    def flops_per_token(self) -> float:
        """Operations of a forward pass for a token, without attention."""
        share = self.num_chosen / self.num_experts if self.num_experts else 0.0
        return 2 * (self.num_dense + share * self.num_routed)

    def count_experts_read(self, num_sequences: float) -> float:
        """Return the parameters of routed experts that a decoding step of so many sequences reads."""
        if not self.num_experts:
            return 0.0
        share: float = 1 - (1 - self.num_chosen / self.num_experts) ** num_sequences
        return self.num_routed * share


def describe_work(trainers: ForecastSide, engines: ForecastSide) -> ModelWork:
    """Return the work of a model. Raise `ConfigError` if its shape has no closed form."""
    model = trainers.model.as_text
    geometry = model.geometry
    if geometry is None or geometry.model_type == "gpt_oss":
        raise ConfigError("--simulate: layers of this model are not known, only its tensors are")
    experts = geometry.experts
    num_routed = sum(math.prod(each.shape) for each in model.tensors if ".mlp.experts." in each.name)
    num_parameters = sum(math.prod(each.shape) for each in model.tensors)
    embedding = geometry.vocabulary_size * geometry.hidden_size
    size = sum(math.prod(each.shape) * ITEM_SIZES[each.dtype] for each in engines.model.tensors)
    num = sum(math.prod(each.shape) for each in engines.model.tensors)
    cached, kv_heads, pair = _describe_attention(geometry)
    return ModelWork(
        num_parameters=num_parameters,
        num_dense=num_parameters - num_routed - (0 if geometry.is_tied else embedding),
        num_routed=num_routed,
        num_layers=geometry.num_layers,
        num_expert_layers=len(experts.layers) if experts else 0,
        hidden=geometry.hidden_size,
        num_experts=experts.num_experts if experts else 0,
        num_chosen=experts.num_chosen if experts else 0,
        expert_size=experts.intermediate_size if experts else 0,
        cache_bytes=2.0 * cached * geometry.num_layers,
        num_heads=geometry.attention.num_heads,
        num_kv_heads=kv_heads,
        attention_flops=2.0 * pair * geometry.num_layers,
        engine_item=size / num,
    )


def _describe_attention(geometry: DecoderGeometry) -> tuple[int, int, int]:
    """Return the cached elements of a token and layer, the heads these are cut by, and the elements of a pair."""
    sizes = geometry.attention
    if isinstance(sizes, LatentAttention):
        pair = sizes.num_heads * (sizes.nope_dim + sizes.rope_dim + sizes.value_dim)
        return sizes.kv_rank + sizes.rope_dim, 1, pair
    return 2 * sizes.num_kv_heads * sizes.head_dim, sizes.num_kv_heads, 2 * sizes.num_heads * sizes.head_dim


class DecodingRate(msgspec.Struct, frozen=True):
    """Seconds of a decoding step: a constant, and so much for each cached token."""

    fixed_s: float
    cached_s: float


class EngineRoofline:
    """Rates of one engine."""

    def __init__(
        self,
        work: ModelWork,
        division: Vllm,
        gpu: GpuRates,
        fitted: FittedEfficiencies,
        share: float,
        per_node: int = 8,
    ) -> None:
        """Take the engine's parallel sizes, the share of a GPU's memory that it has, and the GPUs of a node."""
        self._work, self._fitted = work, fitted
        self._ranks, self._pp = division.tp * division.dp, division.pp
        kind = gpu.kind
        # A copy reads and writes each byte.
        self._bytes_s = kind.memory_gb_s * fitted.memory if gpu.copied_gb_s is None else 2 * gpu.copied_gb_s
        self._bytes_s *= _GB
        self._flops_s = kind.tflops * _TERA * fitted.products
        is_far = self._ranks > kind.domain
        columns = work.expert_size if division.expert_parallel else work.expert_size / self._ranks
        self._narrowness = 1 + fitted.expert_columns / columns if columns else 1.0
        hop_s = fitted.far_hop_s if self._ranks > per_node else fitted.hop_s
        self._hop_s = 0.0 if self._ranks == 1 else hop_s
        self._link_s = (_network(gpu) if is_far else _peer(gpu)) * fitted.links
        self._kv_shares = min(self._ranks, work.num_kv_heads) * self._pp if division.dp == 1 else self._ranks * self._pp
        weights = work.num_parameters * work.engine_item / (self._ranks * self._pp)
        free = kind.memory_gb * _GB * share - weights
        self.max_tokens = max(0.0, free) * self._kv_shares / work.cache_bytes
        """Tokens whose keys and values fit next to the weights; 0 if the weights do not fit."""
        self._rates: dict[int, DecodingRate] = {}

    def decode(self, num_sequences: int) -> DecodingRate:
        """Return the seconds of a decoding step of so many sequences."""
        rate = self._rates.get(num_sequences)
        if rate is None:
            rate = self._rates[num_sequences] = self._decode(num_sequences)
        return rate

    def _decode(self, num_sequences: int) -> DecodingRate:
        work, fitted = self._work, self._fitted
        num = num_sequences / self._pp  # stages take turns with as many parts of the batch
        read = work.num_dense + work.count_experts_read(num) * self._narrowness
        read *= work.engine_item / (self._ranks * self._bytes_s)
        products = num * work.flops_per_token / (self._ranks * self._flops_s)
        moved = 4 * num * work.hidden * (self._ranks - 1) / self._ranks / self._link_s
        exchanged = 2 * work.num_layers * (self._hop_s + moved)
        fixed = max(read, products) + exchanged + fitted.decode_s + num_sequences * fitted.sequence_s
        return DecodingRate(fixed, work.cache_bytes / (self._kv_shares * self._bytes_s))

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds that prompts take, of so many tokens together."""
        flops = num_tokens * self._work.flops_per_token
        return flops / (self._ranks * self._pp * self._flops_s)


class StepSeconds(msgspec.Struct, frozen=True):
    """Seconds of the trainers' work for a step."""

    logprobs_s: float
    training_s: float


class TrainerRoofline:
    """Rates of the trainers, whose ranks work in step."""

    def __init__(
        self, config: Config, work: ModelWork, division: Megatron | DTensor, gpu: GpuRates, fitted: FittedEfficiencies
    ) -> None:
        """Take how the trainers divide the model."""
        self._config, self._work, self._gpu, self._fitted = config, work, gpu, fitted
        policy = config.policy
        self._is_megatron = isinstance(division, Megatron)
        if isinstance(division, Megatron):
            self._tp, self._cp, self._pp, self._ep = division.tp, division.cp, division.pp, division.ep
            recomputes = policy.megatron_cfg.activation_checkpointing
        else:
            self._tp, self._cp, self._pp = division.tensor, policy.dtensor_cfg.context_parallel_size, 1
            self._ep = division.expert
            recomputes = policy.activation_checkpointing_enabled
        self._dp = config.data_parallel_size
        self._num_ranks = division.num_ranks
        self._passes = 1 + _BACKWARD + recomputes
        self._flops_s = gpu.kind.tflops * _TERA * fitted.products
        self.num_scored = len(config.scored_by(config.num_optimizer_steps))
        """Models that score a batch before it is trained on."""

    def step(self, lengths: Sequence[int]) -> StepSeconds:
        """Return the seconds for sequences of these tokens, prompts included."""
        policy, work = self._config.policy, self._work
        num_tokens, num = float(sum(lengths)), len(lengths)
        pairs = sum(length * length for length in lengths) / 2
        flops = num_tokens * work.flops_per_token + pairs * work.attention_flops
        num_steps = self._config.num_optimizer_steps
        packing = policy.sequence_packing if policy.sequence_packing.enabled else policy.dynamic_batching
        rows = [policy.logprob_batch_size, policy.train_micro_batch_size]
        if packing.enabled:
            batches = [count_bins(lengths, tokens) for tokens in (packing.logprob_mb_tokens, packing.train_mb_tokens)]
        else:  # rows are padded to their longest, and take as long as if they were not: an assumption
            batches = [-(-num // size) for size in rows]
        logprobs_s = self.num_scored * self._passes_s(flops, num_tokens, batches[0], 1, 1)
        training_s = self._passes_s(flops, num_tokens, batches[1], num_steps, self._passes)
        return StepSeconds(logprobs_s, training_s + num_steps * self._optimizer_s())

    def _passes_s(self, flops: float, num_tokens: float, num_batches: int, num_steps: int, passes: int) -> float:
        """Return the seconds of passes over a step's micro-batches, in so many optimizer steps."""
        work, fitted = self._work, self._fitted
        of_rank = math.ceil(num_batches / (num_steps * self._dp))
        turns = num_steps * (of_rank + self._pp - 1)
        num_of_rank = num_steps * of_rank
        cut = self._tp * self._cp
        layers, expert_layers = work.num_layers / self._pp, work.num_expert_layers / self._pp
        tokens = num_tokens / self._dp / num_of_rank  # of a micro-batch
        seconds = passes * flops / self._dp / num_of_rank / (cut * self._pp * self._flops_s)
        seconds += passes * (layers * fitted.layer_s)
        if self._tp > 1:  # two all-reduces a layer, forward, and as many backward, of each rank's tokens
            moved = 4 * tokens / self._cp * work.hidden * (self._tp - 1) / self._tp
            seconds += min(passes, 3) * layers * 2 * moved / self._rate(self._tp)
        if work.num_experts:
            seconds += passes * expert_layers * fitted.expert_s * work.num_experts / self._ep
            if self._ep > 1:  # dispatch and combine
                moved = 2 * 2 * tokens / cut * work.num_chosen * work.hidden * (self._ep - 1) / self._ep
                seconds += passes * expert_layers * moved / self._rate(self._ep * self._tp)
        if not self._is_megatron:  # FSDP2 gathers every layer for each pass, and reduces gradients in float32
            num_bytes = work.num_parameters / self._tp * (2 * min(passes, 2) + (4 if passes > 1 else 0))
            seconds = max(seconds, num_bytes / self._rate(self._num_ranks))
        return turns * seconds

    def _optimizer_s(self) -> float:
        """Return the seconds of an optimizer step, with the exchange of gradients and new weights."""
        work = self._work
        dense = (work.num_parameters - work.num_routed) / (self._tp * self._pp)
        routed = work.num_routed / (self._ep * self._pp)
        state = 20 * work.num_parameters / self._num_ranks / (self._gpu.kind.memory_gb_s * _GB * self._fitted.memory)
        if not self._is_megatron:
            return state
        return state + 6 * (dense + routed) / self._rate(self._num_ranks)

    def _rate(self, num_ranks: int) -> float:
        """Return bytes a second between so many neighbours."""
        far = num_ranks > self._gpu.kind.domain
        return (_network(self._gpu) if far else _peer(self._gpu)) * self._fitted.links


def count_bins(lengths: Sequence[int], capacity: int) -> int:
    """Return how many rows of `capacity` tokens sequences fill: a lower bound that packing all but reaches.

    No two sequences longer than half of a row share one.
    """
    large = sum(length > capacity / 2 for length in lengths)
    return max(1, large, math.ceil(sum(lengths) / capacity))


def refit_s(
    config: Config, work: ModelWork, num_trainers: int, num_replicas: int, gpu: GpuRates, fitted: FittedEfficiencies
) -> float:
    """Return the seconds of a refit: trainers send every engine one copy, evenly, over their busiest link."""
    wire = (
        _peer(gpu)
        if config.is_colocated or gpu.kind.domain >= config.cluster.num_nodes * config.cluster.gpus_per_node
        else _network(gpu)
    )
    sent = work.num_parameters * work.engine_item * num_replicas / num_trainers
    return fitted.refit_s + sent / (wire * fitted.refit_links)


def _peer(gpu: GpuRates) -> float:
    return (gpu.kind.peer_gb_s if gpu.peer_gb_s is None else gpu.peer_gb_s) * _GB


def _network(gpu: GpuRates) -> float:
    return (gpu.kind.network_gb_s if gpu.network_gb_s is None else gpu.network_gb_s) * _GB
