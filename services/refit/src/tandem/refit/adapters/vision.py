"""The tensors of vision models, by their names in memory: the language model's and the tower's.

Checkpoints of some families have older names, which Transformers translates as it reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.config.models.vision_families import VISION, VisionFamily
from tandem.refit.adapters.geometry import OUTPUT_LAYER, geometry_of, tensors_of
from tandem.refit.layout import Tensor

_LANGUAGE = {
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "gemma3": "gemma3_text",
    "smolvlm": "llama",
    "idefics3": "llama",
}
"""Architectures of the language models, by the families' ``model_type``."""
_CHANNELS = 3
_Parts = Iterator[tuple[str, tuple[int, ...]]]


def tensors_of_seeing(config: Mapping[str, Any], dtype: str) -> Iterator[Tensor]:
    """Yield the tensors of a vision model, from its ``config.json``. Raises `KeyError` if a size is missing."""
    family, text, vision = VISION[config["model_type"]], language_config(config), config["vision_config"]
    tower = _qwen(vision, family) if family.is_qwen else _siglip(vision, family)
    for name, shape in tower:
        yield Tensor(family.tower_prefix + name, shape, dtype)
    for name, shape in _projector(config, vision, text["hidden_size"], family):
        yield Tensor(family.projector_prefix + name, shape, dtype)
    for tensor in tensors_of(text, geometry_of(text), dtype):
        suffix = tensor.name.removeprefix("model.")
        yield Tensor(suffix if suffix == OUTPUT_LAYER else family.language_prefix + suffix, tensor.shape, tensor.dtype)


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a ``config.json`` of the language model alone would say, from that of a vision model."""
    text = {**config, **(config.get("text_config") or {}), "model_type": _LANGUAGE[config["model_type"]]}
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return text


def as_text(name: str, family: VisionFamily) -> str:
    """Return a tensor's name as a model of text has it; names of the tower and the projector are unchanged."""
    suffix = name.removeprefix(family.language_prefix)
    return name if suffix == name else f"model.{suffix}"


def as_seeing(name: str, family: VisionFamily) -> str:
    """Return the name in a vision model of a tensor, or a layer, of its language model."""
    suffix = name.removeprefix("model.")
    return name if suffix == name else family.language_prefix + suffix


def is_of_tower(name: str, family: VisionFamily) -> bool:
    """Return whether a tensor of a vision model is of its tower or of its projector."""
    return name.startswith((family.tower_prefix, family.projector_prefix))


def _linear(name: str, rows: int, columns: int) -> _Parts:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, size: int) -> _Parts:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _qwen(vision: Mapping[str, Any], family: VisionFamily) -> _Parts:
    """Yield the tensors of Qwen's towers, but for the merger, which is the projector."""
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    has_biases = family.model_type == "qwen3_vl"
    patch = (vision.get("temporal_patch_size", 2), vision["patch_size"], vision["patch_size"])
    yield "patch_embed.proj.weight", (hidden, _CHANNELS, *patch)
    if has_biases:
        yield "patch_embed.proj.bias", (hidden,)
        yield "pos_embed.weight", (vision["num_position_embeddings"], hidden)
    for block in range(vision["depth"]):
        at = f"blocks.{block}."
        for norm in ("norm1", "norm2"):
            parts = list(_norm(at + norm, hidden))
            yield from parts if has_biases else parts[:1]
        yield from _linear(f"{at}attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{at}attn.proj", hidden, hidden)
        names = ("linear_fc1",) if has_biases else ("gate_proj", "up_proj")
        for name in names:
            yield from _linear(f"{at}mlp.{name}", inner, hidden)
        yield from _linear(f"{at}mlp.{'linear_fc2' if has_biases else 'down_proj'}", hidden, inner)
    if has_biases:
        merged = hidden * vision.get("spatial_merge_size", 2) ** 2
        for level in range(len(vision["deepstack_visual_indexes"])):
            yield from _merger(f"deepstack_merger_list.{level}.", merged, merged, vision["out_hidden_size"])


def _merger(prefix: str, norm: int, merged: int, out: int) -> _Parts:
    yield from _norm(f"{prefix}norm", norm)
    yield from _linear(f"{prefix}linear_fc1", merged, merged)
    yield from _linear(f"{prefix}linear_fc2", out, merged)


def _siglip(vision: Mapping[str, Any], family: VisionFamily) -> _Parts:
    """Yield the tensors of a SigLIP tower without a head, as SmolVLM, Idefics3 and Gemma 3 have it."""
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield "embeddings.patch_embedding.weight", (hidden, _CHANNELS, patch, patch)
    yield "embeddings.patch_embedding.bias", (hidden,)
    yield "embeddings.position_embedding.weight", ((vision["image_size"] // patch) ** 2, hidden)
    for layer in range(vision["num_hidden_layers"]):
        at = f"encoder.layers.{layer}."
        for name in ("layer_norm1", "layer_norm2"):
            yield from _norm(at + name, hidden)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{at}self_attn.{name}", hidden, hidden)
        yield from _linear(f"{at}mlp.fc1", inner, hidden)
        yield from _linear(f"{at}mlp.fc2", hidden, inner)
    yield from _norm("post_layernorm", hidden)


def _projector(config: Mapping[str, Any], vision: Mapping[str, Any], out: int, family: VisionFamily) -> _Parts:
    hidden = vision["hidden_size"]
    merged = hidden * vision.get("spatial_merge_size", 2) ** 2
    match family.model_type:
        case "qwen2_5_vl":
            yield "ln_q.weight", (hidden,)
            yield from _linear("mlp.0", merged, merged)
            yield from _linear("mlp.2", vision["out_hidden_size"], merged)
        case "qwen3_vl":
            yield from _merger("", hidden, merged, vision["out_hidden_size"])
        case "gemma3":
            yield "mm_input_projection_weight", (hidden, out)
            yield "mm_soft_emb_norm.weight", (hidden,)
        case _:
            yield "modality_projection.proj.weight", (out, hidden * config.get("scale_factor", 2) ** 2)


def names_in_checkpoint(name: str, family: VisionFamily) -> tuple[str, ...]:
    """Return the names that a tensor may have in a checkpoint's files: that in memory, and an older one."""
    return (name, as_text(name, family), name.removeprefix("model."))
