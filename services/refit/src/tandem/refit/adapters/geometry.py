"""Decoders of known architectures: their sizes, and the tensors that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tandem.refit.layout import Tensor

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "mistral",
    "gemma3_text",
    "phi3",
    "gpt_oss",
    "glm4_moe",
)
"""The known architectures, by their ``model_type``."""

BIAS = "e_score_correction_bias"
"""Correction that routers add to their scores when they choose experts; always float32."""

_HEAD_DIMS = {"qwen3": 128, "gemma3_text": 256, "gpt_oss": 64}
"""Head dimensions that transformers assumes when the file names none."""

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
"""Norms of a layer; most families have the first two."""

OUTPUT_LAYER = "lm_head.weight"
SCALAR_HEAD = "score"
"""Name that Transformers' classifiers give to the layer in place of the output layer."""

LAYER = "model.layers.{layer}."
"""Prefix of the name of each of a layer's tensors; patterns keep the braces."""


class AttentionGeometry(msgspec.Struct, frozen=True):
    """Attention with grouped heads: `num_heads` queries share `num_kv_heads` keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class LatentAttention(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    num_heads: int
    query_rank: int | None
    """Rank that queries are compressed to; None if they are not compressed."""
    kv_rank: int
    nope_dim: int
    """Elements of a query or key head without position."""
    rope_dim: int
    """Elements with position; all heads share the keys' elements."""
    value_dim: int


class ExpertGeometry(msgspec.Struct, frozen=True):
    """A mixture of experts in place of the dense feed-forward network of some layers."""

    num_experts: int
    num_chosen: int
    """Routed experts that each token goes to."""
    intermediate_size: int
    """Intermediate size of one routed expert."""
    shared_size: int
    """Intermediate size of all shared experts together; 0 if there are none."""
    has_bias: bool
    """Whether the router adds a correction to its scores (``e_score_correction_bias``, always float32)."""
    layers: tuple[int, ...]
    """Numbers of the layers with experts."""


class DecoderGeometry(msgspec.Struct, frozen=True):
    """The sizes that decide how a backend shards a decoder of a known architecture."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Intermediate size of dense layers."""
    vocabulary_size: int
    is_tied: bool
    """Whether the output layer is the embedding, in which case there is no ``lm_head.weight``."""
    attention: AttentionGeometry | LatentAttention
    experts: ExpertGeometry | None
    """Experts; None for gpt_oss too, because its checkpoints already fuse the experts."""

    def rows_of(self, part: str) -> tuple[str, int]:
        """Return the checkpoint layer that contains a projection, and the projection's first row in it.

        `part` is one of q, k, v, o, gate, up and down.
        """
        if self.model_type != "phi3" or part in ("o", "down"):
            return f"{part}_proj", 0
        assert isinstance(self.attention, AttentionGeometry), "phi3 has heads"
        heads = self.attention
        first_key, first_value = (n * heads.head_dim for n in (heads.num_heads, heads.num_heads + heads.num_kv_heads))
        firsts = {"q": 0, "k": first_key, "v": first_value, "gate": 0, "up": self.intermediate_size}
        return "gate_up_proj" if part in ("gate", "up") else "qkv_proj", firsts[part]


def geometry_of(config: Mapping[str, Any]) -> DecoderGeometry:
    """Return the sizes given in the ``config.json`` of a known architecture. Raises `KeyError` if one is missing."""
    num_heads = int(config["num_attention_heads"])
    attention: AttentionGeometry | LatentAttention
    if config["model_type"] == "deepseek_v3":
        attention = LatentAttention(
            num_heads=num_heads,
            query_rank=config["q_lora_rank"],
            kv_rank=config["kv_lora_rank"],
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
        )
    else:
        head_dim = _HEAD_DIMS.get(config["model_type"], config["hidden_size"] // num_heads)
        attention = AttentionGeometry(
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or head_dim,
        )
    return DecoderGeometry(
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        vocabulary_size=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", config["model_type"] == "gemma3_text")),
        attention=attention,
        experts=_experts(config),
    )


def _experts(config: Mapping[str, Any]) -> ExpertGeometry | None:
    layers = range(config["num_hidden_layers"])
    if config["model_type"] == "qwen3_moe":
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        return ExpertGeometry(
            num_experts=config.get("num_experts") or config["num_local_experts"],
            num_chosen=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            shared_size=0,
            has_bias=False,
            layers=tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
        )
    if config["model_type"] in ("deepseek_v3", "glm4_moe"):
        return ExpertGeometry(
            num_experts=config.get("n_routed_experts") or config["num_local_experts"],
            num_chosen=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            shared_size=(config["n_shared_experts"] or 0) * config["moe_intermediate_size"],
            has_bias=True,
            layers=tuple(layers[config["first_k_dense_replace"] :]),
        )
    return None


def find_biased_projections(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the linear layers with biases, by the last part of their names, as transformers creates them."""
    projections: set[str] = set()
    heads = {"q_proj", "k_proj", "v_proj"}
    if config["model_type"] == "qwen2":
        projections = heads
    elif config.get("attention_bias", config["model_type"] == "gpt_oss"):
        match config["model_type"]:
            case "deepseek_v3":
                projections = {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}
            case "glm4_moe":
                projections = heads
            case "mistral" | "phi3":  # neither family reads this field
                pass
            case _:
                projections = heads | {"o_proj"}
    if config["model_type"] == "llama" and config.get("mlp_bias"):
        projections |= {"gate_proj", "up_proj", "down_proj"}
    return frozenset(projections)


def tensors_of(config: Mapping[str, Any], geometry: DecoderGeometry, dtype: str) -> Iterator[Tensor]:
    """Yield the tensors of a checkpoint in the order of the layers."""
    hidden, vocabulary = geometry.hidden_size, geometry.vocabulary_size
    with_experts = geometry.experts.layers if geometry.experts else ()
    attention = list(_attention(config, geometry))
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden), dtype)
    for layer in range(geometry.num_layers):
        if geometry.model_type == "gpt_oss":
            feed_forward = _fused_moe(config, geometry)
        else:
            feed_forward = _moe(geometry) if layer in with_experts else _dense(config, geometry)
        parts = [*attention, *feed_forward, *((f"{name}.weight", (hidden,)) for name in _norms(geometry))]
        for name, shape in parts:
            yield Tensor(LAYER.format(layer=layer) + name, shape, "float32" if name.endswith(BIAS) else dtype)
    yield Tensor("model.norm.weight", (hidden,), dtype)
    if not geometry.is_tied:
        yield Tensor(OUTPUT_LAYER, (vocabulary, hidden), dtype)


_Parts = Iterator[tuple[str, tuple[int, ...]]]


def has_head_norms(config: Mapping[str, Any]) -> bool:
    """Return whether queries and keys are normalised, head by head."""
    if config["model_type"] == "glm4_moe":
        return bool(config.get("use_qk_norm"))
    return str(config["model_type"]).startswith(("qwen3", "gemma3"))


def _norms(geometry: DecoderGeometry) -> tuple[str, ...]:
    return NORMS if geometry.model_type == "gemma3_text" else NORMS[:2]


def _attention(config: Mapping[str, Any], geometry: DecoderGeometry) -> _Parts:
    hidden, sizes = geometry.hidden_size, geometry.attention
    if isinstance(sizes, LatentAttention):
        rows = _latent(sizes, hidden)
    else:
        query_rows, kv_rows = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        parts = {"q": query_rows, "k": kv_rows, "v": kv_rows}
        rows = {}
        for part, n in parts.items():  # the last projection in a fused layer gives that layer's number of rows
            name, first = geometry.rows_of(part)
            rows[name] = (first + n, hidden)
        rows["o_proj"] = (hidden, query_rows)
        if has_head_norms(config):
            yield "self_attn.q_norm.weight", (sizes.head_dim,)
            yield "self_attn.k_norm.weight", (sizes.head_dim,)
        if geometry.model_type == "gpt_oss":
            yield "self_attn.sinks", (sizes.num_heads,)
    biased = find_biased_projections(config)
    for name, shape in rows.items():
        yield f"self_attn.{name}.weight", shape
        if name in biased:
            yield f"self_attn.{name}.bias", shape[:1]


def _latent(sizes: LatentAttention, hidden: int) -> dict[str, tuple[int, ...]]:
    query_rows = sizes.num_heads * (sizes.nope_dim + sizes.rope_dim)
    rows: dict[str, tuple[int, ...]] = {"q_proj": (query_rows, hidden)}
    if sizes.query_rank is not None:
        rank = sizes.query_rank
        rows = {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (query_rows, rank)}
    return rows | {
        "kv_a_proj_with_mqa": (sizes.kv_rank + sizes.rope_dim, hidden),
        "kv_a_layernorm": (sizes.kv_rank,),
        "kv_b_proj": (sizes.num_heads * (sizes.nope_dim + sizes.value_dim), sizes.kv_rank),
        "o_proj": (hidden, sizes.num_heads * sizes.value_dim),
    }


def _dense(config: Mapping[str, Any], geometry: DecoderGeometry) -> _Parts:
    if geometry.rows_of("gate") != ("gate_proj", 0):
        yield "mlp.gate_up_proj.weight", (2 * geometry.intermediate_size, geometry.hidden_size)
        yield "mlp.down_proj.weight", (geometry.hidden_size, geometry.intermediate_size)
        return
    is_biased = "down_proj" in find_biased_projections(config)
    for name, shape in _feed_forward("mlp.", geometry.hidden_size, geometry.intermediate_size):
        yield name, shape
        if is_biased:
            yield name.replace(".weight", ".bias"), shape[:1]


def _moe(geometry: DecoderGeometry) -> _Parts:
    experts = geometry.experts
    assert experts is not None, "only called for layers with experts"
    yield "mlp.gate.weight", (experts.num_experts, geometry.hidden_size)
    if experts.has_bias:
        yield f"mlp.gate.{BIAS}", (experts.num_experts,)
    for expert in range(experts.num_experts):
        yield from _feed_forward(f"mlp.experts.{expert}.", geometry.hidden_size, experts.intermediate_size)
    if experts.shared_size:
        yield from _feed_forward("mlp.shared_experts.", geometry.hidden_size, experts.shared_size)


def _fused_moe(config: Mapping[str, Any], geometry: DecoderGeometry) -> _Parts:
    num_experts = config.get("num_local_experts") or config["num_experts"]
    hidden, intermediate = geometry.hidden_size, geometry.intermediate_size
    yield "mlp.router.weight", (num_experts, hidden)
    yield "mlp.router.bias", (num_experts,)
    yield "mlp.experts.gate_up_proj", (num_experts, hidden, 2 * intermediate)
    yield "mlp.experts.gate_up_proj_bias", (num_experts, 2 * intermediate)
    yield "mlp.experts.down_proj", (num_experts, intermediate, hidden)
    yield "mlp.experts.down_proj_bias", (num_experts, hidden)


def _feed_forward(prefix: str, hidden: int, intermediate: int) -> _Parts:
    yield f"{prefix}gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}up_proj.weight", (intermediate, hidden)
    yield f"{prefix}down_proj.weight", (hidden, intermediate)
