"""Pixels of images, and the features that a tower makes of them: what trainers and engines share.

`pixels` is what Transformers' own processor makes of an image, always with PIL: its other backend resizes to different
pixels, and a trainer and an engine on two machines would differ. A tower's output for single images equals that for
several at once, to the bit, so outputs can be kept by digest and joined.

Shapes: ``P`` patches or crops of an image; ``I`` images; ``F`` features.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tandem.common.errors import DataError, ModelError
from tandem.config.models.vision_families import VisionFamily
from tandem.samples.images.families import Grid
from tandem.samples.images.store import ReadThrough

if TYPE_CHECKING:
    from PIL.Image import Image

Inputs = dict[str, torch.Tensor]
"""Arguments of a model's forward pass, or of its ``get_image_features``."""


class TowerPixels(NamedTuple):
    """An image as a tower takes it."""

    tensors: Inputs
    """The processor's tensors: their first dimension counts patches, crops, or the image."""
    grid: Grid
    """How it is divided: `tandem.common.messages.ImageRef.grid`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.nbytes for each in self.tensors.values())


def load_processor(folder: Path | str) -> Any:
    """Return the image processor of a model's folder, which computes with PIL. Raises `ModelError`."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(str(folder), backend="pil", trust_remote_code=False)
    except Exception as error:  # the library passes on any error of its readers
        raise ModelError(f"cannot load the image processor of {str(folder)!r}: {error}".split("\n")[0]) from error


def check_model(model: Any) -> None:
    """Raise `ModelError` unless a model's forward pass takes features of images that were made before."""
    if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:
        from transformers import __version__

        raise ModelError(
            f"{type(model).__name__} of transformers {__version__} takes no image features: use 5.24 or later"
        )


def pixels(family: VisionFamily, processor: Any, image: Image) -> TowerPixels:
    """Return what a tower takes of an image, as RGB. Raises `DataError` if the processor cannot take it."""
    extra = {"return_row_col_info": True} if family.has_crops else {}
    try:
        processed = processor(images=[image], return_tensors="pt", **extra)
    except Exception as error:  # processors raise whatever a strange size makes them raise
        raise DataError(f"an image of {image.width} × {image.height} pixels cannot be used: {error}") from error
    if family.is_qwen:
        grid = tuple(int(number) for number in processed["image_grid_thw"][0])
        return TowerPixels({"pixel_values": processed["pixel_values"]}, grid)
    if family.has_crops:
        tensors = {name: processed[name][0] for name in ("pixel_values", "pixel_attention_mask")}
        return TowerPixels(tensors, (int(processed["rows"][0][0]), int(processed["cols"][0][0])))
    return TowerPixels({"pixel_values": processed["pixel_values"]}, ())


def tower_inputs(family: VisionFamily, images: Sequence[TowerPixels], device: torch.device | None = None) -> Inputs:
    """Return the inputs of a tower for several images, in order: also a forward pass takes them."""
    inputs = {
        name: torch.cat([each.tensors[name] for each in images]).to(device or "cpu") for name in images[0].tensors
    }
    if family.is_qwen:
        inputs["image_grid_thw"] = torch.tensor([each.grid for each in images], device=device)
    if family.has_crops:  # crops of all images, as if of one sample: those of samples would be padded
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    return inputs


def encode(model: Any, inputs: Inputs) -> Any:
    """Return a tower's output for `tower_inputs`: what `join` and the model's ``mm_encoder_outputs`` take.

    A model writes into the ``mm_encoder_outputs`` that it is given: make a new ``{"image": output}`` for each call.
    """
    return model.model.get_image_features(**inputs, return_dict=True)


def join(outputs: Sequence[Any]) -> Any:
    """Return a tower's outputs for some images as one output for all of them, in order.

    Only the features are joined: the language model takes nothing else.
    """
    joined = copy.copy(outputs[0])
    joined.pooler_output = _join([each.pooler_output for each in outputs])
    levels = getattr(outputs[0], "deepstack_features", None)
    if levels is not None:
        joined.deepstack_features = [
            _join([each.deepstack_features[level] for each in outputs]) for level in range(len(levels))
        ]
    return joined


def _join(features: Sequence[Any]) -> Any:
    """Join features: a tensor ``[I, F, H]``, or a sequence of tensors ``[F, H]``."""
    if torch.is_tensor(features[0]):
        return torch.cat(list(features))
    return tuple(each for image_features in features for each in image_features)


def num_bytes(output: Any) -> int:
    """Return the bytes of an output's features."""
    return sum(each.nbytes for each in features_of(output))


def features_of(output: Any) -> list[torch.Tensor]:
    """Return an output's tensors of features: those of images, or of several at once, and of deeper layers."""
    outputs = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [part for each in outputs for part in ([each] if torch.is_tensor(each) else each)]


def features_only(output: Any) -> Any:
    """Return an output without what the language model does not take, such as the tower's last hidden states."""
    features = {name: getattr(output, name, None) for name in ("pooler_output", "deepstack_features")}
    return type(output)(**{name: value for name, value in features.items() if value is not None})


class PixelCache(ReadThrough[TowerPixels]):
    """Processed images, up to a number of bytes."""

    def __init__(self, read: Callable[[str], TowerPixels], max_bytes: int = 2**30) -> None:
        """Take what is missing from `read`, by digest."""
        super().__init__(read, lambda tower_pixels: tower_pixels.num_bytes, max_bytes)
