"""vLLM's models, with towers of vision models: tensor, pipeline, data and expert parallel, any type.

Fused parameters: ``qkv_proj`` has a rank's query heads, then its key heads, then its value heads; with more ranks than
key heads, ranks share a key head. ``gate_up_proj`` has a rank's rows of the gate before its rows of the up projection.
``w13_weight`` and ``w2_weight`` have the experts of a rank. ``fused_qkv_a_proj`` (DeepSeek) has both down projections,
whole. The vocabulary is padded to a multiple of 64 and cut over the ranks.

Names and shapes are those of vLLM 0.32 after its weight loaders have run. A backend that packs or transposes weights
after loading must be disabled, or repack after each refit. Some models have embeddings on pipeline stages that never
read them; those are not transferred.

Towers of vision models are those of ``mm_encoder_tp_mode="data"``: each rank has the tower whole. vLLM does not
do that for SmolVLM and Idefics3, whose towers are cut over the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator

import msgspec

from tandem.common.errors import RefitError
from tandem.config.models import mtp_layers
from tandem.config.models.families import VLLM_PLANNED
from tandem.config.models.vision_families import VISION, VisionFamily
from tandem.refit.adapters import catalogue, deployment, geometry, vision
from tandem.refit.adapters.dtensor import TENSOR_PLAN
from tandem.refit.adapters.parameters import ParameterFill, RankBuilder, cut, gate_and_up, stack
from tandem.refit.layout import Box, Layout, Tensor, whole

_ATTENTION = geometry.LAYER + "self_attn."
_VOCABULARY_PADDING = 64
_CUT = (
    (re.compile(r"\.(?:[qkv]_proj|fc1)\.(?:weight|bias)$"), 0),
    (re.compile(r"\.(?:out_proj|fc2)\.weight$"), 1),
)
"""Layers of a SigLIP tower that ranks share, with the dimension along which they do."""
_KEYS_AND_VALUES = re.compile(r"\.self_attn\.[kv]_proj\.(?:weight|bias)$")
_FUSED = re.compile(r"\.(?:self_attn\.(?P<qkv>[qkv])|mlp\.(?P<gate_up>gate|up))_proj\.(?P<kind>weight|bias)$")


def add_tower(builder: RankBuilder, model: catalogue.ModelShape, rank: int, size: int) -> None:
    """Add what one of `size` ranks has of the tower and the projector, under the tensors' own names.

    Raises `RefitError` if a layer cannot be split over them.
    """
    family = VISION[model.family]
    parts_by_name: dict[str, list[tuple[str, Box]]] = {}
    for tensor in model.tensors:  # the parts of a fused layer are in order, for weights and for biases
        if vision.is_of_tower(tensor.name, family):
            name, box = tensor.name, whole(tensor.shape)
            for pattern, dim in _CUT if family.has_crops and name.startswith(family.tower_prefix) else ():
                if pattern.search(name):
                    box = cut(tensor.shape, dim, rank, size)
            parts_by_name.setdefault(_FUSED.sub(_name_fused, name), []).append((name, box))
    for name, parts in parts_by_name.items():
        rows = sum(box.shape[0] for _, box in parts)
        builder.parameter(name, (rows, *parts[0][1].shape[1:]), stack(*parts))


def rename_for_vllm(layout: Layout, model: catalogue.ModelShape) -> Layout:
    """Return a layout with the parameters of a vision model under vLLM's names."""
    prefixes = tuple(_prefixes(VISION[model.family]))

    def renamed(name: str) -> str:
        old, new = next(pair for pair in prefixes if name.startswith(pair[0]))
        return new + name.removeprefix(old)

    storages = (msgspec.structs.replace(each, name=renamed(each.name)) for each in layout.storages)
    return msgspec.structs.replace(layout, storages=tuple(storages), tensors=model.tensors)


def _name_fused(match: re.Match[str]) -> str:
    layer = "self_attn.qkv_proj" if match["qkv"] else "mlp.gate_up_proj"
    return f".{layer}.{match['kind']}"


def _prefixes(family: VisionFamily) -> Iterator[tuple[str, str]]:
    """Yield prefixes of names of ours with those of vLLM's; the first that matches is meant."""
    if family.has_crops:  # as Transformers has it
        yield family.tower_prefix, family.tower_prefix
        yield family.projector_prefix, family.projector_prefix
        yield "model.", family.language_prefix
        yield geometry.OUTPUT_LAYER, geometry.OUTPUT_LAYER
        return
    yield family.tower_prefix, family.tower_prefix.removeprefix("model.")
    yield "model.", "language_model.model."
    yield geometry.OUTPUT_LAYER, f"language_model.{geometry.OUTPUT_LAYER}"


class VllmCoordinates(msgspec.Struct, frozen=True):
    """A rank's position along the axes that decide what it holds."""

    tp: int
    pp: int
    expert: int
    """Position among the `dp` × `tp` ranks of a stage that share its experts."""


class Vllm(deployment.ParallelDeployment, frozen=True):
    """Parallel sizes by vLLM's names. Ranks count with `tp` fastest, then `pp`, `dp` and the replicas."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Data parallel size: dense weights are repeated, experts are spread over ``dp × tp`` ranks."""
    replicas: int = 1
    """Number of independent engines."""
    expert_parallel: bool = False
    """Whether each rank has whole experts (``enable_expert_parallel``) rather than a slice of every expert."""
    experts_module: str = "mlp.experts.routed_experts"
    """Module within a layer that has ``w13_weight``: ``mlp.experts`` in older releases."""

    @property
    def num_ranks(self) -> int:
        """Number of processes in all engines."""
        return self.tp * self.pp * self.dp * self.replicas

    @property
    def repeats_shared_experts(self) -> bool:
        """Whether each rank has the shared experts whole, as in vLLM when it spreads a batch over `tp`."""
        return self.expert_parallel and self.tp > 1 and self.dp > 1

    def place(self, rank: int) -> Hashable:
        """Return the coordinates of a rank."""
        return self.coordinates(rank)

    def coordinates(self, rank: int) -> VllmCoordinates:
        """Return a rank's coordinates."""
        rank, tp = divmod(rank, self.tp)
        rank, pp = divmod(rank, self.pp)
        return VllmCoordinates(tp, pp, rank % self.dp * self.tp + tp)

    def parameters(self, model: catalogue.ModelShape, rank: int) -> Layout:
        """Return a rank's layout without its host. Raises `RefitError` for an unknown family."""
        text = model.as_text
        if text.required_geometry.model_type not in VLLM_PLANNED:
            families = ", ".join(VLLM_PLANNED)
            raise RefitError(
                f"it is unknown how vLLM shards a {text.required_geometry.model_type}; known are {families}"
            )
        built = _Rank(self, text, self.coordinates(rank)).build()
        return rename_for_vllm(built, model) if model.family else built


class _Rank:
    """Builder of one rank's layout."""

    def __init__(self, sizes: Vllm, model: catalogue.ModelShape, at: VllmCoordinates) -> None:
        self._sizes, self._model, self._at, self._geometry = sizes, model, at, model.required_geometry
        self._builder = RankBuilder(model, deployment.list_vllm_stages(self._geometry.num_layers, sizes.pp)[at.pp])

    def build(self) -> Layout:
        if self._model.family:
            if self._sizes.pp > 1:
                raise RefitError(f"pipeline stages of a {self._model.family}, which sees, are not built for vLLM")
            add_tower(self._builder, self._model, self._at.tp, self._sizes.tp)
        self._ends()
        if isinstance(self._geometry.attention, geometry.LatentAttention):
            self._latent_attention(self._geometry.attention)
        else:
            self._attention(self._geometry.attention)
        self._cut(_ATTENTION + "o_proj.weight", dim=1)
        for name in ("self_attn.o_proj.bias", *(f"{norm}.weight" for norm in geometry.NORMS)):
            self._replicate(geometry.LAYER + name)
        self._feed_forward(geometry.LAYER + "mlp.")
        self._feed_forward(geometry.LAYER + "mlp.shared_experts.", is_cut=not self._sizes.repeats_shared_experts)
        if self._geometry.experts is not None:
            self._replicate(geometry.LAYER + "mlp.gate.weight")
            self._replicate(geometry.LAYER + "mlp.gate.e_score_correction_bias")
            self._experts(self._geometry.experts)
        self._draft_layers()
        return self._builder.build()

    def _ends(self) -> None:
        """Add embedding, last norm and output layer to the stages that have them."""
        is_first, is_last = self._at.pp == 0, self._at.pp == self._sizes.pp - 1
        embedding = "model.embed_tokens.weight"
        if is_first or (is_last and self._geometry.is_tied):
            self._vocabulary(embedding)
        if is_last:
            self._replicate("model.norm.weight")
            if not self._geometry.is_tied:
                self._vocabulary("lm_head.weight")

    def _vocabulary(self, name: str) -> None:
        rows, hidden = self._geometry.vocabulary_size, self._geometry.hidden_size
        padded = -(-rows // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        share = cut((padded, hidden), 0, self._at.tp, self._sizes.tp)
        box = share.intersect(whole((rows, hidden)))
        if box is not None:
            self._builder.parameter(name, share.shape, stack((name, box)))
        else:
            self._builder.padding(name, share.shape, name)

    def _attention(self, sizes: geometry.AttentionGeometry) -> None:
        tp, head = self._sizes.tp, sizes.head_dim
        num_kv_heads = max(1, sizes.num_kv_heads // tp)
        if sizes.num_heads % tp or num_kv_heads * tp % sizes.num_kv_heads:
            heads = f"{sizes.num_heads} query heads and {sizes.num_kv_heads} key heads"
            raise RefitError(f"{heads} cannot be split over {tp} ranks")
        num_heads, first_kv = sizes.num_heads // tp, self._at.tp * sizes.num_kv_heads // tp
        rows = ("q", self._at.tp * num_heads, num_heads), ("k", first_kv, num_kv_heads), ("v", first_kv, num_kv_heads)
        for kind in ("weight", "bias"):
            columns = (self._geometry.hidden_size,) if kind == "weight" else ()
            boxes = []
            for part, a, n in rows:
                layer, first_row = self._geometry.rows_of(part)
                box = Box((first_row + head * a, *(0 for _ in columns)), (head * n, *columns))
                boxes.append((f"{_ATTENTION}{layer}.{kind}", box))
            if self._model.shape_of(boxes[0][0]) is None:
                continue
            self._fuse(f"{_ATTENTION}qkv_proj.{kind}", *boxes)
        for part in "qk":
            self._replicate(f"{_ATTENTION}{part}_norm.weight")

    def _latent_attention(self, sizes: geometry.LatentAttention) -> None:
        hidden = self._geometry.hidden_size
        keys = f"{_ATTENTION}kv_a_proj_with_mqa.weight"
        if sizes.query_rank is None:
            self._replicate(keys)
        else:
            queries = f"{_ATTENTION}q_a_proj.weight", whole((sizes.query_rank, hidden))
            parts = queries, (keys, whole((sizes.kv_rank + sizes.rope_dim, hidden)))
            self._fuse(f"{_ATTENTION}fused_qkv_a_proj.weight", *parts)
        for part in ("q_a", "kv_a"):
            self._replicate(f"{_ATTENTION}{part}_layernorm.weight")
        for part in ("q", "q_b", "kv_b"):
            self._cut(f"{_ATTENTION}{part}_proj.weight")

    def _draft_layers(self) -> None:
        """Add layers of multi-token prediction, which follow the policy's tensors under the trainers' names."""
        for tensor in reversed(self._model.tensors):
            if not tensor.name.startswith(mtp_layers.PREFIX):
                return
            dim = TENSOR_PLAN.get(".".join(tensor.name.rsplit(".", 2)[-2:]))
            if ".experts." in tensor.name:
                self._experts_of_draft(tensor)
            elif dim is None:
                self._replicate(tensor.name)
            elif _KEYS_AND_VALUES.search(tensor.name) is not None:
                self._heads_of_draft(tensor)
            else:
                self._cut(tensor.name, dim)

    def _heads_of_draft(self, tensor: Tensor) -> None:
        """Add the rows of a rank's key heads, or value heads; ranks share one where there are more ranks than heads."""
        attention, tp, columns = self._geometry.attention, self._sizes.tp, tensor.shape[1:]
        assert isinstance(attention, geometry.AttentionGeometry), "latent attention has no such projections"
        num_heads = attention.num_kv_heads
        head = tensor.shape[0] // num_heads
        share = head * max(1, num_heads // tp), *columns
        box = Box((head * (self._at.tp * num_heads // tp), *(0 for _ in columns)), share)
        self._builder.parameter(tensor.name, share, stack((tensor.name, box)))

    def _experts_of_draft(self, tensor: Tensor) -> None:
        """Add a rank's share of a layer's experts, which trainers have in one tensor: gates before up projections."""
        num_experts, rows, columns = tensor.shape
        experts, rank, size = self._divide_experts(num_experts)
        is_down = tensor.name.endswith("down_proj")
        parts = (0,) if is_down else (0, rows // 2)
        sizes = (rows, columns // size) if is_down else (rows // 2 // size, columns)
        fills = []
        for number, first in enumerate(parts):
            start = (0, rank * sizes[1]) if is_down else (first + rank * sizes[0], 0)
            box = Box((experts.start, *start), (len(experts), *sizes))
            fills.append(ParameterFill(tensor.name, box, (0, number * sizes[0], 0)))
        self._builder.parameter(tensor.name, (len(experts), len(parts) * sizes[0], sizes[1]), fills)

    def _divide_experts(self, num_experts: int) -> tuple[range, int, int]:
        """Return this rank's experts, its place among the ranks that share each of them, and the number of those."""
        at, size = self._at.expert, self._sizes.dp * self._sizes.tp
        if not self._sizes.expert_parallel:
            return range(num_experts), at, size
        count, extra = divmod(num_experts, size)
        first = at * count + min(at, extra)
        return range(first, first + count + (at < extra)), 0, 1

    def _feed_forward(self, prefix: str, is_cut: bool = True) -> None:
        """Add a dense network, or the shared experts, which form one network."""
        rank, size = (self._at.tp, self._sizes.tp) if is_cut else (0, 1)
        for kind in ("weight", "bias"):
            parts = gate_and_up(self._model, prefix, kind, rank, size)
            if parts:
                self._fuse(f"{prefix}gate_up_proj.{kind}", *parts)
        down = f"{prefix}down_proj.weight"
        self._builder.share(down, down, 1, rank, size)
        self._replicate(f"{prefix}down_proj.bias")

    def _experts(self, sizes: geometry.ExpertGeometry) -> None:
        experts, tp, tp_size = self._divide_experts(sizes.num_experts)
        hidden = self._geometry.hidden_size
        rows = cut((sizes.intermediate_size, hidden), 0, tp, tp_size)
        columns = cut((hidden, sizes.intermediate_size), 1, tp, tp_size)
        checkpoint_prefix, prefix = (
            geometry.LAYER + "mlp.experts.{expert}.",
            f"{geometry.LAYER}{self._sizes.experts_module}.",
        )
        fills = stack(*((f"{checkpoint_prefix}{part}_proj.weight", rows) for part in ("gate", "up")))
        stacked = [msgspec.structs.replace(fill, at=(0, *fill.at)) for fill in fills]
        self._builder.parameter(f"{prefix}w13_weight", (len(experts), 2 * rows.shape[0], hidden), stacked, experts)
        fill = msgspec.structs.replace(stack((checkpoint_prefix + "down_proj.weight", columns))[0], at=(0, 0, 0))
        self._builder.parameter(f"{prefix}w2_weight", (len(experts), *columns.shape), [fill], experts)

    def _fuse(self, name: str, *parts: tuple[str, Box]) -> None:
        """Add a parameter of slices one after the other."""
        num_rows = sum(box.shape[0] for _, box in parts)
        self._builder.parameter(name, (num_rows, *parts[0][1].shape[1:]), stack(*parts))

    def _replicate(self, name: str) -> None:
        self._builder.replicate(name, name)

    def _cut(self, name: str, dim: int = 0) -> None:
        self._builder.share(name, name, dim, self._at.tp, self._sizes.tp)
