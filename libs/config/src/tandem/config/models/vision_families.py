"""Families of vision models: the special tokens of their images, and the names of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.config.models.model_sizes import read_model_config
from tandem.config.schema import ModelConfig
from tandem.config.schema.policy import DtensorCfg


class VisionFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A family of models that take images, by its ``model_type`` in Transformers."""

    model_type: str
    placeholder: str
    """Text that a chat template writes for an image; it is replaced by the image's expansion."""
    image_token: str
    """Token, once for each feature, whose embedding the image's feature replaces."""
    part: str
    """Text of an image in a conversation whose template reads no content parts; contains the placeholder."""
    begin_token: str
    """First special token of an image's expansion; the image token itself where the template writes those around."""
    end_token: str
    """Last special token of an image's expansion."""
    tokens: tuple[str, ...]
    """Special tokens that stand for pictures and their like: no text may contain them, no model may draw them."""
    special_tokens: tuple[str, ...]
    """Special tokens that the tokenizer of a new model gets for images."""
    token_fields: Mapping[str, str]
    """Fields of ``config.json`` that have the number of one of these tokens, with the token."""
    image_processor: str
    """Class of Transformers that turns images into pixels."""
    tower_prefix: str
    """Prefix of the parameters of the tower that turns pixels into features."""
    projector_prefix: str
    """Prefix of those that turn the features into embeddings of the language model; within the tower for Qwen."""
    language_prefix: str
    """Prefix of the parameters of the language model."""
    has_mrope: bool
    """Whether a position is three numbers, so that an image's tokens stand in a plane."""
    has_image_blocks: bool
    """Whether the tokens of an image attend to each other in both directions."""

    @property
    def is_qwen(self) -> bool:
        """Whether images are divided into patches by their own size, as Qwen does."""
        return self.model_type.startswith("qwen")

    @property
    def has_crops(self) -> bool:
        """Whether a large image is divided into crops of one size, in rows and columns."""
        return self.model_type in ("smolvlm", "idefics3")


def _make_qwen(model_type: str) -> VisionFamily:
    return VisionFamily(
        model_type=model_type,
        placeholder="<|image_pad|>",
        image_token="<|image_pad|>",
        part="<|vision_start|><|image_pad|><|vision_end|>",
        begin_token="<|image_pad|>",
        end_token="<|image_pad|>",
        tokens=("<|image_pad|>", "<|video_pad|>"),
        special_tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        token_fields={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        image_processor="Qwen2VLImageProcessor",
        tower_prefix="model.visual.",
        projector_prefix="model.visual.merger.",
        language_prefix="model.language_model.",
        has_mrope=True,
        has_image_blocks=False,
    )


def _make_with_crops(model_type: str) -> VisionFamily:
    return VisionFamily(
        model_type=model_type,
        placeholder="<image>",
        image_token="<image>",
        part="<image>",
        begin_token="<fake_token_around_image>",
        end_token="<fake_token_around_image>",
        tokens=("<image>", "<fake_token_around_image>", "<global-img>", "<video>"),
        special_tokens=(
            "<fake_token_around_image>",
            "<image>",
            "<end_of_utterance>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
        ),
        token_fields={"image_token_id": "<image>"},
        image_processor="SmolVLMImageProcessor" if model_type == "smolvlm" else "Idefics3ImageProcessor",
        tower_prefix="model.vision_model.",
        projector_prefix="model.connector.",
        language_prefix="model.text_model.",
        has_mrope=False,
        has_image_blocks=False,
    )


_GEMMA3 = VisionFamily(
    model_type="gemma3",
    placeholder="<start_of_image>",
    image_token="<image_soft_token>",
    part="<start_of_image>",
    begin_token="<start_of_image>",
    end_token="<end_of_image>",
    tokens=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    special_tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    token_fields={
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "image_token_index": "<image_soft_token>",
    },
    image_processor="Gemma3ImageProcessor",
    tower_prefix="model.vision_tower.",
    projector_prefix="model.multi_modal_projector.",
    language_prefix="model.language_model.",
    has_mrope=False,
    has_image_blocks=True,
)

VISION: dict[str, VisionFamily] = {
    family.model_type: family
    for family in (
        _make_qwen("qwen2_5_vl"),
        _make_qwen("qwen3_vl"),
        _GEMMA3,
        _make_with_crops("smolvlm"),
        _make_with_crops("idefics3"),
    )
}
"""Families that can be trained with images, by their ``model_type``."""


def find_vision_family(model_config: Mapping[str, Any] | None) -> VisionFamily | None:
    """Return the family of a ``config.json``'s content; None if it takes no images here, or is unknown."""
    model_type = (model_config or {}).get("model_type")
    return VISION.get(model_type) if isinstance(model_type, str) else None


def family_of(section: ModelConfig) -> VisionFamily | None:
    """Return the family of a section's model; None if it does not see, or is not on this machine."""
    return find_vision_family(read_model_config(section))


def list_frozen_prefixes(family: VisionFamily, settings: DtensorCfg) -> tuple[str, ...]:
    """Return the prefixes of the parts of a model that ``automodel_kwargs.freeze_config`` names."""
    frozen: Mapping[str, Any] = settings.automodel_kwargs.get("freeze_config") or {}
    if not frozen:
        return ()
    parts = {
        family.tower_prefix: frozen.get("freeze_vision_tower", True),
        family.language_prefix: frozen.get("freeze_language_model", False),
    }
    return tuple(prefix for prefix, is_frozen in parts.items() if is_frozen)
