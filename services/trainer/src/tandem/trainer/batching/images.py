"""The images of a micro-batch, found by the tokens that stand for them.

Shapes: ``B`` rows of ``T`` padded positions, ``L`` tokens of a sequence; ``N`` tokens of the model's row; ``M`` tokens
of a sequence up to an image's last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.errors import DataError, ModelError, WireError
from tandem.config import Config
from tandem.config.models.model_sizes import local_folder
from tandem.samples.batch import DIGEST_BYTES, GRID_SIZES, MEDIA, SampleBatch, media_columns
from tandem.samples.batch_sharding import EMPTY_ROW
from tandem.samples.images.families import Grid, ImageSettings, grid_size, num_tokens, positions, read_settings
from tandem.trainer.micro_batches import TokenRow


class ImageBlock(NamedTuple):
    """The tokens of an image that attend to each other in both directions."""

    row: int
    """Row that they are in."""
    size: int
    """Number of them."""
    source_M: torch.Tensor
    """int64; the tokens of the row that their sequence consists of, in order, up to the image's last one."""


class RowImages(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The images whose tokens are in a micro-batch, as its model takes them: an image of a shared prompt once."""

    digests: tuple[str, ...]
    """In the order of their tokens: the rows one after the other, and the images in each."""
    grids: tuple[Grid, ...]
    """How they are divided, as the prompts' tokens say (`tandem.common.messages.ImageRef.grid`)."""
    position_ids: torch.Tensor | None
    """int64, ``[3, B, T]``, or ``[3, 1, N]`` for a row: time, height and width of each token; None for a model whose
    tokens are only counted.
    """
    blocks: tuple[ImageBlock, ...] = ()
    """The images in the rows that the model takes, for a family whose images attend in both directions."""


class ImageFormat(msgspec.Struct, frozen=True):
    """The images of samples: `tandem.trainer.micro_batches.MediaFormat`."""

    settings: ImageSettings
    """The model's settings for images."""

    @classmethod
    def of(cls, config: Config) -> ImageFormat:
        """Return the format of the images of a run's vision model. Raises `ModelError`."""
        name = config.policy.tokenizer.name
        return cls(read_settings(local_folder(name) or Path(name), name))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return MEDIA

    def make_empty(self) -> dict[str, NDArray[Any]]:
        """Return the columns of no sample."""
        return media_columns([])

    def check(self, batch: SampleBatch) -> None:
        """Raise `WireError` unless the images are possible, and those of the tokens."""
        check_images(batch)
        check_image_tokens(batch, self.settings)

    def lay_out(
        self,
        batch: SampleBatch,
        rows: Sequence[int],
        token_ids_BT: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        row: TokenRow | None,
        device: torch.device,
    ) -> RowImages:
        """Return the images of a micro-batch. Raises `ModelError` if they are not those of the tokens."""
        return row_images(batch, rows, token_ids_BT, lengths_B, row, self.settings, device)


def row_images(
    batch: SampleBatch,
    rows: Sequence[int],
    token_ids_BT: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    row: TokenRow | None,
    settings: ImageSettings,
    device: torch.device,
) -> RowImages:
    """Return the images of a micro-batch. Raises `ModelError` if a sequence has other image tokens than its images."""
    position_XBT = np.zeros((3 if settings.family.has_mrope else 1, *token_ids_BT.shape), dtype=np.int64)
    placed_images: list[tuple[int, str, Grid]] = []
    """Place of the first token among the ``B * T`` positions, digest and grid of each image."""
    for place, (sequence, length) in enumerate(zip(rows, lengths_B.tolist(), strict=True)):
        if sequence == EMPTY_ROW:
            continue
        digests, grids = images_in(batch, sequence, settings)
        token_ids_L = token_ids_BT[place, :length]
        try:
            position_XBT[:, place, :length], _ = positions(settings, token_ids_L.tolist(), grids)
        except DataError as error:
            raise ModelError(f"sequence {sequence} of the shard: {error}") from error
        starts = np.flatnonzero(token_ids_L == settings.image_token_id)
        used = 0
        for digest, grid in zip(digests, grids, strict=True):
            placed_images.append((place * token_ids_BT.shape[1] + int(starts[used]), digest, grid))
            used += num_tokens(settings, grid)
    if row is not None:
        source_N = row.source_N.cpu().numpy()
        position_XBT = np.where(source_N >= 0, position_XBT.reshape(len(position_XBT), 1, -1)[..., source_N], 0)
        row_places = set(source_N.tolist())
        placed_images = [each for each in placed_images if each[0] in row_places]
    return RowImages(
        digests=tuple(digest for _, digest, _ in placed_images),
        grids=tuple(grid for _, _, grid in placed_images),
        position_ids=torch.from_numpy(position_XBT).to(device) if settings.family.has_mrope else None,
        blocks=_blocks(placed_images, settings, token_ids_BT.shape, row, device)
        if settings.family.has_image_blocks
        else (),
    )


def _blocks(
    images: Sequence[tuple[int, str, Grid]],
    settings: ImageSettings,
    shape: tuple[int, ...],
    row: TokenRow | None,
    device: torch.device,
) -> tuple[ImageBlock, ...]:
    """Return the blocks of images that begin at these places among the ``B * T`` positions of this shape."""
    num_rows, width = shape
    place_BT = np.tile(np.arange(width), (num_rows, 1))
    if row is not None:
        place_BT = np.full(num_rows * width, -1)
        source_N = row.source_N.cpu().numpy()
        place_BT[source_N[source_N >= 0]] = np.flatnonzero(source_N >= 0)
        place_BT = place_BT.reshape(num_rows, width)
        if row.source_BW is not None:  # a sample's prompt may be in the row as another's
            source_BW = row.source_BW.cpu().numpy()
            used = min(width, source_BW.shape[1])
            place_BT[:, :used] = source_BW[:, :used]
    blocks = []
    for source, _, grid in images:
        sample, start = divmod(source, width)
        size = num_tokens(settings, grid)
        source_M = torch.from_numpy(place_BT[sample, : start + size].copy()).to(device)
        blocks.append(ImageBlock(sample if row is None else 0, size, source_M))
    return tuple(blocks)


def images_in(batch: SampleBatch, row: int, settings: ImageSettings) -> tuple[list[str], list[Grid]]:
    """Return the digests and the grids of a sequence's images."""
    size = grid_size(settings.family)
    first, last = batch.offsets("I")[row : row + 2]
    digests = [digest.tobytes().hex() for digest in batch.image_digests_IX[first:last]]
    return digests, [tuple(grid[:size]) for grid in batch.image_grids_IX[first:last].tolist()]


def check_image_tokens(batch: SampleBatch, settings: ImageSettings) -> None:
    """Raise `WireError` unless each sequence has the image tokens of its images, as many as their grids need."""
    ends_S = batch.offsets()
    for row in range(len(batch)):
        _, grids = images_in(batch, row, settings)
        tokens_T = batch.token_ids_T[ends_S[row] : ends_S[row + 1]]
        num_present = int((tokens_T == settings.image_token_id).sum())
        try:
            num_needed = sum(num_tokens(settings, grid) for grid in grids)
        except ValueError as error:
            raise WireError(f"image_grids_IX: sequence {row} has an impossible grid: {error}") from error
        if num_present != num_needed:
            raise WireError(
                f"token_ids_T: sequence {row} has {num_present} image tokens, and its {len(grids)} images need "
                f"{num_needed}"
            )


def check_images(batch: SampleBatch) -> None:
    """Raise `WireError` unless each image has a digest and a grid."""
    for name, size in (("image_digests_IX", DIGEST_BYTES), ("image_grids_IX", GRID_SIZES)):
        if batch.columns[name].shape[1] != size:
            raise WireError(f"{name}: {batch.columns[name].shape[1]} numbers an image, must be {size}")
    if (batch.image_grids_IX < 0).any():
        raise WireError(f"image_grids_IX: {batch.image_grids_IX.min()}, must be at least 0")
