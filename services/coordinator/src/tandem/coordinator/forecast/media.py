"""Memory that a trainer needs for images: that of the tower of a vision model, and its frozen weights.

Each term of a tower is read from those of Transformers with attention that keeps no scores. How many tokens images
have is not known before the data is: a prompt has at most as many as it has tokens, so that is what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from tandem.config import Config
from tandem.config.models.model_sizes import read_model_config
from tandem.config.models.vision_families import VISION, list_frozen_prefixes
from tandem.refit.adapters.catalogue import ModelShape

TITLE = "images"
"""Title of this memory in plans."""
_TOWER_LAYER = {"qwen2_5_vl": (11, 8, 4), "qwen3_vl": (11, 0, 2)}
"""Sizes of what a layer keeps of a patch: elements and bytes by hidden size, and elements by intermediate size."""
_LAYER_OF_SIGLIP = (8, 0, 2)
_ENDS = {"qwen2_5_vl": (4, 4), "qwen3_vl": (4, 0)}
"""The same of what stands before and behind the layers, for each hidden size."""
_ENDS_OF_SIGLIP = (1, 0)
_OF_LEVEL = 3
"""Elements for each hidden size that a merger of Qwen3-VL's deeper levels keeps."""
_TOKENS_OF_GEMMA = 256


class TowerSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a tower."""

    model_type: str
    depth: int
    hidden: int
    inner: int
    num_levels: int
    """Levels beside the last that reach the language model."""
    patch: int
    """Elements of a patch's pixels."""
    patches_per_token: float
    """Patches that become one image token."""

    def measure_kept(self, num_tokens: float, item: int, *, recomputes: bool) -> float:
        """Return the bytes that are kept of images with so many tokens, with elements of `item` bytes."""
        num_patches = num_tokens * self.patches_per_token
        elements, num_bytes, of_inner = _TOWER_LAYER.get(self.model_type, _LAYER_OF_SIGLIP)
        layer = (elements * item + num_bytes) * self.hidden + of_inner * item * self.inner
        elements, num_bytes = _ENDS.get(self.model_type, _ENDS_OF_SIGLIP)
        elements += _OF_LEVEL * self.num_levels
        ends = (elements * item + num_bytes) * self.hidden + item * self.patch
        return num_patches * (self.depth * (item * self.hidden if recomputes else layer) + ends)


def tower_of(config: Config, model: ModelShape) -> TowerSizes | None:
    """Return the tower of a vision model, if it is trained; None otherwise, since then it keeps nothing."""
    if not model.family or config.policy.adapters is not None:
        return None
    family = VISION[model.family]
    if family.tower_prefix in list_frozen_prefixes(family, config.policy.dtensor_cfg):
        return None
    shapes = {
        tensor.name.removeprefix(family.tower_prefix): tensor.shape
        for tensor in model.tensors
        if tensor.name.startswith(family.tower_prefix)
    }
    name = "patch_embed.proj.weight" if family.is_qwen else "embeddings.patch_embedding.weight"
    hidden, *patch = shapes[name]
    inner = next(shape[0] for name, shape in shapes.items() if name.endswith((".gate_proj.weight", "fc1.weight")))
    layers = {name.split(".")[-4] for name in shapes if name.endswith(("attn.proj.weight", "self_attn.q_proj.weight"))}
    return TowerSizes(
        model_type=model.family,
        depth=len(layers),
        hidden=hidden,
        inner=inner,
        num_levels=sum(name.startswith("deepstack_merger_list.") and ".linear_fc1.weight" in name for name in shapes),
        patch=math.prod(patch),
        patches_per_token=_patches_per_token(config, model, hidden),
    )


def _patches_per_token(config: Config, model: ModelShape, hidden: int) -> float:
    family = VISION[model.family]
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    if model.family == "gemma3":
        num_patches = shapes[f"{family.tower_prefix}embeddings.position_embedding.weight"][0]
        config_json = read_model_config(config.policy) or {}
        return num_patches / int(config_json.get("mm_tokens_per_image", _TOKENS_OF_GEMMA))
    merger = {"qwen2_5_vl": "mlp.0.weight", "qwen3_vl": "linear_fc1.weight"}
    merged = shapes[family.projector_prefix + merger.get(model.family, "modality_projection.proj.weight")]
    return merged[1] / hidden


def bound_image_tokens(config: Config, num_tokens: float) -> float:
    """Return how many of the tokens of a micro-batch may stand for images: those of prompts."""
    longest, generation = config.policy.max_total_sequence_length, config.policy.generation
    if not config.declaration.rolls_out:
        return num_tokens
    return num_tokens * max(0.0, 1.0 - generation.max_new_tokens / longest)


class MediaMeasure(Protocol):
    """A measure of the bytes that are kept of the media among tokens."""

    def __call__(self, num_tokens: float, item: int, *, recomputes: bool) -> float:
        """Return the bytes for ``N`` tokens, with elements of `item` bytes."""
        ...


def make_measure(config: Config, model: ModelShape) -> MediaMeasure:
    """Return the measure of what a model's tower keeps; that of a model without one is zero."""
    tower, share = tower_of(config, model), bound_image_tokens(config, 1.0)

    def measure(num_tokens: float, item: int, *, recomputes: bool) -> float:
        return 0.0 if tower is None else tower.measure_kept(share * num_tokens, item, recomputes=recomputes)

    return measure


def describe_bound(config: Config, titles: Iterable[str]) -> Iterator[str]:
    """Yield how many tokens were taken for those of images, if these are among the titles of memory."""
    if TITLE in titles:
        share = bound_image_tokens(config, 1.0)
        yield f"{TITLE}: as if all tokens of prompts stood for some, {share:.0%} of a micro-batch's"


def find_frozen(config: Config, model: ModelShape) -> Callable[[str], bool]:
    """Return whether a trainer's parameter is of a part of a vision model that stays as it is, by its name."""
    family = VISION.get(model.family)
    prefixes = () if family is None else list_frozen_prefixes(family, config.policy.dtensor_cfg)

    def is_frozen(name: str) -> bool:
        if family is not None and config.policy.megatron_cfg.enabled:
            # As Transformers would begin it; an output layer of its own is in no part.
            suffix = name.removeprefix("tower.")
            name = suffix if suffix != name or name.startswith("output_layer.") else family.language_prefix
        return bool(prefixes) and name.startswith(prefixes)

    return is_frozen
