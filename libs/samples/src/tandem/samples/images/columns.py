"""The images of sequences as columns of a batch (`tandem.samples.batch.MEDIA`)."""

from __future__ import annotations

from tandem.common.errors import WireError
from tandem.samples.batch import DIGEST_BYTES, GRID_SIZES, SampleBatch
from tandem.samples.images.families import ImageSettings, grid_size, num_tokens


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
