"""The images of sequences as columns of a batch (`tandem.samples.batch.MEDIA`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import WireError
from tandem.common.messages import ImageRef
from tandem.samples.batch import SampleBatch
from tandem.samples.images.families import ImageSettings, grid_size, num_tokens

DIGEST_BYTES = 32
GRID_SIZES = 3


def image_columns(images: Sequence[Sequence[ImageRef]]) -> dict[str, NDArray[Any]]:
    """Return the columns of sequences with these images; a grid of fewer numbers is padded with zeros."""
    flat = [image for references in images for image in references]
    digests = np.frombuffer(bytes.fromhex("".join(image.digest for image in flat)), dtype=np.uint8)
    grids = [(*image.grid, *(0,) * (GRID_SIZES - len(image.grid))) for image in flat]
    return {
        "num_images_S": np.array([len(references) for references in images], dtype=np.int32),
        "image_digests_IX": digests.reshape(-1, DIGEST_BYTES),
        "image_grids_IX": np.array(grids, dtype=np.int32).reshape(-1, GRID_SIZES),
    }


def prompt_images(sample: SampleBatch, prompt_length: int, settings: ImageSettings) -> bytes:
    """Return the digests of the images in a sample's prompt; others stand in later turns."""
    num_left = int((sample.token_ids_T[:prompt_length] == settings.image_token_id).sum())
    num_images = 0
    while num_left > 0 and num_images < len(sample.image_grids_IX):
        grid = sample.image_grids_IX[num_images].tolist()
        num_left -= num_tokens(settings, grid[: grid_size(settings.family)])
        num_images += 1
    return sample.image_digests_IX[:num_images].tobytes()


def check_images(batch: SampleBatch) -> None:
    """Raise `WireError` unless each image has a digest and a grid."""
    for name, size in (("image_digests_IX", DIGEST_BYTES), ("image_grids_IX", GRID_SIZES)):
        if batch.columns[name].shape[1] != size:
            raise WireError(f"{name}: {batch.columns[name].shape[1]} numbers an image, must be {size}")
    if (batch.image_grids_IX < 0).any():
        raise WireError(f"image_grids_IX: {batch.image_grids_IX.min()}, must be at least 0")
