"""The towers of vision models in vLLM: its names, and the layers that it fuses.

Names and shapes are those of vLLM 0.32 with ``mm_encoder_tp_mode="data"``: each rank has the tower whole. vLLM does not
do that for SmolVLM and Idefics3, whose towers are cut over the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from tandem.config.models.vision_families import VISION, VisionFamily
from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.adapters.geometry import OUTPUT_LAYER
from tandem.refit.adapters.parameters import RankBuilder, cut, stack
from tandem.refit.adapters.vision import is_of_tower
from tandem.refit.layout import Box, Layout, whole

_CUT = (
    (re.compile(r"\.(?:[qkv]_proj|fc1)\.(?:weight|bias)$"), 0),
    (re.compile(r"\.(?:out_proj|fc2)\.weight$"), 1),
)
"""Layers of a SigLIP tower that ranks share, with the dimension along which they do."""
_FUSED = re.compile(r"\.(?:self_attn\.(?P<qkv>[qkv])|mlp\.(?P<gate_up>gate|up))_proj\.(?P<kind>weight|bias)$")


def add_tower(builder: RankBuilder, model: ModelShape, rank: int, size: int) -> None:
    """Add what one of `size` ranks has of the tower and the projector, under the tensors' own names.

    Raises `RefitError` if a layer cannot be split over them.
    """
    family = VISION[model.family]
    parts_by_name: dict[str, list[tuple[str, Box]]] = {}
    for tensor in model.tensors:  # the parts of a fused layer are in order, for weights and for biases
        if is_of_tower(tensor.name, family):
            name, box = tensor.name, whole(tensor.shape)
            for pattern, dim in _CUT if family.has_crops and name.startswith(family.tower_prefix) else ():
                if pattern.search(name):
                    box = cut(tensor.shape, dim, rank, size)
            parts_by_name.setdefault(_FUSED.sub(_name_fused, name), []).append((name, box))
    for name, parts in parts_by_name.items():
        rows = sum(box.shape[0] for _, box in parts)
        builder.parameter(name, (rows, *parts[0][1].shape[1:]), stack(*parts))


def rename_for_vllm(layout: Layout, model: ModelShape) -> Layout:
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
        yield OUTPUT_LAYER, OUTPUT_LAYER
        return
    yield family.tower_prefix, family.tower_prefix.removeprefix("model.")
    yield "model.", "language_model.model."
    yield OUTPUT_LAYER, f"language_model.{OUTPUT_LAYER}"
