"""Megatron-Core's GPTModel: tensor, pipeline, context, expert and data parallel.

Fused parameters: ``linear_qkv`` has the heads in groups, each with its queries before its key and value. ``linear_fc1``
has a rank's rows of the gate before its rows of the up projection. The vocabulary is padded. Tensor parallelism cuts
these along rows, and ``linear_proj`` and ``linear_fc2`` along columns. As in Megatron-Core 0.16 to 0.19.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Literal

import msgspec

from tandem.common.errors import RefitError
from tandem.config.models import lora
from tandem.config.models.families import MEGATRON
from tandem.config.models.vision_families import VISION
from tandem.refit.adapters import catalogue, deployment, vision
from tandem.refit.adapters.geometry import (
    LAYER,
    OUTPUT_LAYER,
    SCALAR_HEAD,
    AttentionGeometry,
    DecoderGeometry,
    ExpertGeometry,
    LatentAttention,
)
from tandem.refit.adapters.parameters import ParameterFill, RankBuilder, cut, gate_and_up, stack
from tandem.refit.layout import Box, Layout, whole

_ATTENTION = LAYER + "self_attn."
_PARTS = {
    "linear_qkv": ("q", "k", "v"),
    "linear_proj": ("o",),
    "linear_fc1": ("gate", "up"),
    "linear_fc2": ("down",),
}
"""Projections in each linear layer. Its adapter has one ``lora_A`` for all of them."""
_HERE = "{layer}."
TOWER = "tower"
"""Module of the first stage that holds what makes features of images."""


def linear_layers(model: catalogue.ModelShape) -> dict[str, tuple[str, ...]]:
    """Return the linear layers that adapters can name, each with the checkpoint layers that it consists of.

    Names are Megatron-Core's, with layers counted through all stages. Routed experts are listed without checkpoint
    layers, because adapters of them are not supported.
    """
    model = model.as_text
    checkpoint_layers: dict[str, tuple[str, ...]] = {}
    sparse = model.required_geometry.experts.layers if model.required_geometry.experts else ()
    for number in range(model.required_geometry.num_layers):
        prefix, checkpoint_prefix = f"decoder.layers.{number}.", LAYER.format(layer=number)
        for module, part in ("self_attention.", "self_attn."), ("mlp.", "mlp."), ("mlp.shared_experts.",) * 2:
            for name, parts in _PARTS.items():
                layers = tuple(
                    f"{checkpoint_prefix}{part}{each}" for each in _layers_of(parts, model.required_geometry)
                )
                if f"{layers[0]}.weight" in model.index:
                    checkpoint_layers[f"{prefix}{module}{name}"] = layers
        if number in sparse:
            checkpoint_layers |= {f"{prefix}mlp.experts.{name}": () for name in ("linear_fc1", "linear_fc2")}
    if model.family:
        family = VISION[model.family]
        return {
            name: tuple(vision.as_seeing(layer, family) for layer in layers)
            for name, layers in checkpoint_layers.items()
        }
    return checkpoint_layers


def _layers_of(parts: Sequence[str], geometry: DecoderGeometry) -> list[str]:
    """Return the checkpoint layers that contain these projections, once each, by the last part of their names."""
    return list(dict.fromkeys(geometry.rows_of(part)[0] for part in parts))


class MegatronCoordinates(msgspec.Struct, frozen=True):
    """A rank's position along the axes that decide what it holds."""

    tp: int
    pp: int
    ep: int
    etp: int


class Megatron(deployment.ParallelDeployment, frozen=True):
    """Parallel sizes and switches, with shortened names from Megatron-Core's configuration."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallel size of experts; None for `tp`."""
    vpp: int = 1
    """Virtual pipeline size: number of model chunks on each stage."""
    num_layers_in_first_stage: int | None = None
    num_layers_in_last_stage: int | None = None
    order: str = "tp-cp-ep-dp-pp"
    """The axes, fastest-varying first; `ep` applies to experts and `cp` to the rest."""
    vocabulary_divisor: int = 128
    """The padded vocabulary is a multiple of this times `tp` (``make_vocab_size_divisible_by``)."""
    transformer_engine: bool = True
    """Whether Transformer Engine provides the layers; it keeps the norm before a linear layer inside that layer."""
    experts: Literal["grouped", "sequential", "legacy"] = "grouped"
    """TEGroupedMLP (``weight0``, ``weight1``, ...), SequentialMLP, or GroupedMLP (all experts in one, transposed)."""

    @property
    def num_ranks(self) -> int:
        """Number of processes in the program."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_tensor_size(self) -> int:
        """Tensor parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    def place(self, rank: int) -> Hashable:
        """Return the coordinates of a rank."""
        return self.coordinates(rank)

    def coordinates(self, rank: int) -> MegatronCoordinates:
        """Return a rank's coordinates. Raises `RefitError` if the sizes or the order are inconsistent."""
        if sorted(self.order.split("-")) != ["cp", "dp", "ep", "pp", "tp"]:
            raise RefitError(f"the order of ranks must name tp, cp, ep, dp and pp once each, not {self.order!r}")
        etp = self.expert_tensor_size
        expert_dp, remainder = divmod(self.num_ranks, etp * self.ep * self.pp)
        if remainder:
            raise RefitError(f"{self.num_ranks} ranks cannot be split in etp {etp} × ep {self.ep} × pp {self.pp}")
        dense = self._along({"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}, rank)
        sparse = self._along({"tp": etp, "ep": self.ep, "dp": expert_dp, "pp": self.pp}, rank)
        if dense["pp"] != sparse["pp"]:
            raise RefitError(f"rank {rank} would have experts of another pipeline stage; let the order end in pp")
        return MegatronCoordinates(dense["tp"], dense["pp"], sparse["ep"], sparse["tp"])

    def _along(self, sizes: dict[str, int], rank: int) -> dict[str, int]:
        coordinates = {}
        for axis in self.order.split("-"):
            rank, coordinates[axis] = divmod(rank, sizes.get(axis, 1))
        return coordinates

    def parameters(self, model: catalogue.ModelShape, rank: int) -> Layout:
        """Return a rank's layout without its host. Raises `RefitError` for an unknown family.

        Of a vision model, the first stage has the tower, whole on every tensor-parallel rank.
        """
        text = model.as_text
        if text.required_geometry.model_type not in MEGATRON:
            families = ", ".join(MEGATRON)
            raise RefitError(
                f"it is unknown how Megatron-Core shards a {text.required_geometry.model_type}; known are {families}"
            )
        layout = _Rank(self, text, self.coordinates(rank)).build()
        return msgspec.structs.replace(layout, tensors=model.tensors)


class _Rank:
    """Builder of one rank's layout."""

    def __init__(self, sizes: Megatron, model: catalogue.ModelShape, at: MegatronCoordinates) -> None:
        self._sizes, self._model, self._at, self._geometry = sizes, model, at, model.required_geometry
        in_ends = sizes.num_layers_in_first_stage, sizes.num_layers_in_last_stage
        chunks = deployment.list_megatron_stages(self._geometry.num_layers, sizes.pp, sizes.vpp, *in_ends)[at.pp]
        self._prefixes = [f"{chunk}." if sizes.vpp > 1 else "" for chunk in range(sizes.vpp)]
        layers = [layer for chunk in chunks for layer in chunk]
        names = [
            f"{prefix}decoder.layers.{local}"
            for prefix, chunk in zip(self._prefixes, chunks, strict=True)
            for local in range(len(chunk))
        ]
        self._layers, self._names = layers, names
        self._builder: RankBuilder
        self._sparse = frozenset(self._geometry.experts.layers if self._geometry.experts else ())
        self._dense = frozenset(layers) - self._sparse

    def build(self) -> Layout:
        # Ranks that differ only in their experts have the rest in common, made once for all of them.
        builders: dict[tuple[Megatron, int, int], RankBuilder] = self._model.__dict__.setdefault("without experts", {})
        alike = self._sizes, self._at.tp, self._at.pp
        if alike not in builders:
            self._builder = RankBuilder(self._model, self._layers, self._names)
            self._add_dense()
            if any(sizes != self._sizes for sizes, _, _ in builders):
                builders.clear()
            builders[alike] = self._builder
        self._builder = builders[alike].copy()
        if self._geometry.experts is not None:
            self._experts(self._geometry.experts)
        return self._builder.build()

    def _add_dense(self) -> None:
        """Add all but the routed experts."""
        self._ends()
        if isinstance(self._geometry.attention, LatentAttention):
            self._latent_attention()
        else:
            self._attention(self._geometry.attention)
        self._norms()
        self._feed_forward(_HERE + "mlp.", LAYER + "mlp.")
        self._feed_forward(_HERE + "mlp.shared_experts.", LAYER + "mlp.shared_experts.")
        if self._geometry.experts is not None:
            self._builder.replicate(_HERE + "mlp.router.weight", LAYER + "mlp.gate.weight")
            self._builder.replicate(_HERE + "mlp.router.expert_bias", LAYER + "mlp.gate.e_score_correction_bias")

    def _ends(self) -> None:
        """Add embedding, last norm and output layer to the stages that have them."""
        sizes, at, is_tied = self._sizes, self._at, self._geometry.is_tied
        rows, hidden = self._geometry.vocabulary_size, self._geometry.hidden_size
        multiple = sizes.vocabulary_divisor * sizes.tp
        num_rows = -(-rows // multiple) * multiple // sizes.tp
        box = Box((at.tp * num_rows, 0), (num_rows, hidden)).intersect(whole((rows, hidden)))
        embedding = "model.embed_tokens.weight"
        output = embedding if is_tied else OUTPUT_LAYER
        if at.pp == 0:
            self._tower()
            self._vocabulary(self._prefixes[0] + "embedding.word_embeddings.weight", num_rows, embedding, box)
        if at.pp == sizes.pp - 1:
            self._builder.replicate(self._prefixes[-1] + "decoder.final_layernorm.weight", "model.norm.weight")
            for kind in ("weight", "bias"):
                self._builder.replicate(f"{self._prefixes[-1]}{SCALAR_HEAD}.{kind}", f"{SCALAR_HEAD}.{kind}")
            # Without pipeline stages the output layer reuses the embedding; the last of several stages has a copy.
            if self._model.shape_of(output) is not None and not (is_tied and sizes.pp == 1):
                self._vocabulary(self._prefixes[-1] + "output_layer.weight", num_rows, output, box)

    def _tower(self) -> None:
        """Add the tower and the projector of a vision model, under their own names."""
        if self._model.family:
            family = VISION[self._model.family]
            for tensor in self._model.tensors:
                if vision.is_of_tower(tensor.name, family):
                    self._builder.replicate(f"{self._prefixes[0]}{TOWER}.{tensor.name}", tensor.name)

    def _vocabulary(self, name: str, num_rows: int, tensor: str, box: Box | None) -> None:
        """Add this rank's rows of the vocabulary; all may be padding."""
        shape = num_rows, self._geometry.hidden_size
        if box is None:
            self._builder.padding(name, shape, tensor)
        else:
            self._builder.parameter(name, shape, stack((tensor, box)))

    def _attention(self, sizes: AttentionGeometry) -> None:
        head, hidden = sizes.head_dim, self._geometry.hidden_size
        num_queries = sizes.num_heads // sizes.num_kv_heads * head
        num_rows = num_queries + 2 * head
        parts = ("q", 0, num_queries), ("k", num_queries, head), ("v", num_queries + head, head)
        # With more ranks than groups, a rank has only part of a group.
        mine = cut((sizes.num_kv_heads * num_rows,), 0, self._at.tp, self._sizes.tp)
        kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (hidden,)), ("bias", ())]
        adapter = self._model.shape_of(f"{_ATTENTION}{self._geometry.rows_of('q')[0]}.{lora.B}")
        kinds += [(lora.B, adapter[1:])] if adapter is not None else []
        for kind, columns in kinds:
            window = Box((*mine.start, *(0 for _ in columns)), (*mine.shape, *columns))
            fills = []
            for group, (part, first, n) in itertools.product(range(sizes.num_kv_heads), parts):
                layer, first_row = self._geometry.rows_of(part)
                rows = first_row + group * n, group * num_rows + first
                start, at = ((row, *(0 for _ in columns)) for row in rows)
                fill = ParameterFill(f"{_ATTENTION}{layer}.{kind}", Box(start, (n, *columns)), at).clip(window)
                fills += [] if fill is None else [fill]
            if fills and self._model.shape_of(fills[0].tensor) is not None:
                self._builder.parameter(f"{_HERE}self_attention.linear_qkv.{kind}", window.shape, fills)
        self._repeated(f"{_HERE}self_attention.linear_qkv", _ATTENTION)
        for part in "qk":
            name = f"{_HERE}self_attention.{part}_layernorm.weight"
            self._builder.replicate(name, f"{_ATTENTION}{part}_norm.weight")
        self._output_projection()

    def _latent_attention(self) -> None:
        prefix, fuses = _HERE + "self_attention.", self._sizes.transformer_engine
        for part, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
            for kind in ("weight", "bias"):
                # Whole on every rank, with Transformer Engine and with the layers that Tandem has without it.
                self._builder.replicate(f"{prefix}linear_{part}_down_proj.{kind}", f"{_ATTENTION}{down}.{kind}")
            norm = f"linear_{part}_up_proj.layer_norm_weight" if fuses else f"{part}_layernorm.weight"
            self._builder.replicate(prefix + norm, f"{_ATTENTION}{part}_a_layernorm.weight")
            self._cut(f"{prefix}linear_{part}_up_proj.weight", f"{_ATTENTION}{part}_b_proj.weight")
        self._cut(prefix + "linear_q_proj.weight", _ATTENTION + "q_proj.weight")
        self._output_projection()

    def _output_projection(self) -> None:
        for kind in ("weight", lora.A):
            self._cut(f"{_HERE}self_attention.linear_proj.{kind}", f"{_ATTENTION}o_proj.{kind}", dim=1)
        self._builder.replicate(f"{_HERE}self_attention.linear_proj.{lora.B}", f"{_ATTENTION}o_proj.{lora.B}")
        self._builder.replicate(_HERE + "self_attention.linear_proj.bias", _ATTENTION + "o_proj.bias")

    def _norms(self) -> None:
        fuses, is_latent = self._sizes.transformer_engine, isinstance(self._geometry.attention, LatentAttention)
        before = "self_attention.linear_qkv.layer_norm_weight" if fuses and not is_latent else "input_layernorm.weight"
        self._builder.replicate(_HERE + before, LAYER + "input_layernorm.weight")
        before = "mlp.linear_fc1.layer_norm_weight" if fuses else "pre_mlp_layernorm.weight"
        self._builder.replicate(_HERE + before, LAYER + "post_attention_layernorm.weight", self._dense)
        name = _HERE + "pre_mlp_layernorm.weight"
        self._builder.replicate(name, LAYER + "post_attention_layernorm.weight", self._sparse)

    def _feed_forward(self, prefix: str, checkpoint_prefix: str) -> None:
        """Add a dense network, or the shared experts, which form one network."""
        for kind in ("weight", "bias", lora.B):
            parts = gate_and_up(self._model, checkpoint_prefix, kind, self._at.tp, self._sizes.tp)
            if parts:
                _, box = parts[0]
                self._builder.parameter(f"{prefix}linear_fc1.{kind}", (2 * box.shape[0], *box.shape[1:]), stack(*parts))
        self._repeated(f"{prefix}linear_fc1", checkpoint_prefix)
        for kind in ("weight", lora.A):
            self._cut(f"{prefix}linear_fc2.{kind}", f"{checkpoint_prefix}down_proj.{kind}", dim=1)
        self._builder.replicate(f"{prefix}linear_fc2.{lora.B}", f"{checkpoint_prefix}down_proj.{lora.B}")
        self._builder.replicate(f"{prefix}linear_fc2.bias", f"{checkpoint_prefix}down_proj.bias")

    def _experts(self, sizes: ExpertGeometry) -> None:
        """Add the routed experts of this rank."""
        mine = cut((sizes.num_experts,), 0, self._at.ep, self._sizes.ep)
        experts, count = range(mine.start[0], mine.stop[0]), mine.shape[0]
        hidden, etp = self._geometry.hidden_size, self._sizes.expert_tensor_size
        rows = cut((sizes.intermediate_size, hidden), 0, self._at.etp, etp)
        columns = cut((hidden, sizes.intermediate_size), 1, self._at.etp, etp)
        checkpoint_prefix = LAYER + "mlp.experts.{expert}."
        first = stack(*((f"{checkpoint_prefix}{part}_proj.weight", rows) for part in ("gate", "up")))
        second = stack((checkpoint_prefix + "down_proj.weight", columns))
        n = rows.shape[0]
        prefix = _HERE + "mlp.experts."
        if self._sizes.experts == "legacy":
            turned = [ParameterFill(fill.tensor, fill.box, (0, 0, fill.at[0]), axes=(2, 1)) for fill in first]
            self._builder.parameter(prefix + "weight1", (count, hidden, 2 * n), turned, experts)
            turned = [ParameterFill(fill.tensor, fill.box, (0, 0, 0), axes=(2, 1)) for fill in second]
            self._builder.parameter(prefix + "weight2", (count, n, hidden), turned, experts)
            return
        name = (
            "linear_{fc}.weight{{expert}}"
            if self._sizes.experts == "grouped"
            else "local_experts.{{expert}}.linear_{fc}.weight"
        )
        self._builder.parameter(prefix + name.format(fc="fc1"), (2 * n, hidden), first, experts)
        self._builder.parameter(prefix + name.format(fc="fc2"), (hidden, n), second, experts)

    def _repeated(self, name: str, checkpoint_prefix: str) -> None:
        """Add an adapter's ``lora_A``, a copy of which each of this layer's checkpoint layers has."""
        parts = _PARTS[name.rpartition(".")[2]]
        layers = [f"{checkpoint_prefix}{layer}" for layer in _layers_of(parts, self._geometry)]
        shape = self._model.shape_of(f"{layers[0]}.{lora.A}")
        if shape is not None:
            fills = [ParameterFill(f"{layer}.{lora.A}", whole(shape), (0, 0)) for layer in layers]
            self._builder.parameter(f"{name}.{lora.A}", shape, fills)

    def _cut(self, name: str, tensor: str, dim: int = 0) -> None:
        self._builder.share(name, tensor, dim, self._at.tp, self._sizes.tp)
