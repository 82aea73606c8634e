"""Merges of weights with the products of low-rank adapters, as the engine installs a version.

For each slice of a weight: ``live = base + scale * (b @ a)``. The product is computed and scaled in float32, and the
sum is rounded once to the weight's element type. These are the operations of peft's ``merge_and_unload``, in its order,
with adapters in float32, as peft keeps them. Each merge starts from the base, so a version does not depend on earlier
ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from tandem.common.errors import RefitError
from tandem.refit.columns import Ints
from tandem.refit.layout import DTYPES, ITEM_SIZE_OF_CODE
from tandem.refit.program import Merging
from tandem.refit.transports.memory import CopySide, NamedStorages

_TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Approximate elements of a product computed at a time, which bounds the memory of merging."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes."""
_ROWS = 64
"""Rows of a tile are a multiple of this."""


class _Tile(NamedTuple):
    """Some rows of one slice."""

    tensor: str
    scale: float
    live: torch.Tensor
    base: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


class BoundMerging:
    """A `Merging` bound to memory."""

    def __init__(self, member: str, merging: Merging, memory: NamedStorages) -> None:
        """Bind to memory in its final place. Raises `RefitError` if it differs from the plan."""
        self._member = member
        self._num_threads = torch.get_num_threads()
        self._tiles = list(_tiles(merging, memory))

    @property
    def num_bytes(self) -> int:
        """Bytes of weights written by `run` and read by `check`."""
        return sum(tile.live.numel() * tile.live.element_size() for tile in self._tiles)

    @torch.no_grad()
    def run(self, deadline: float) -> None:
        """Merge everything once. Raises `RefitError` if the deadline, on the monotonic clock, passes."""
        self._num_threads = torch.get_num_threads()
        for tile in self._tiles:
            if time.monotonic() > deadline:
                raise RefitError(f"{self._member} failed while merging {tile.tensor}: the deadline passed")
            torch.add(tile.base, _product(tile), out=tile.live)

    def check(self, first: int = 0, one_in: int = 1) -> Iterator[None]:
        """Merge again beside the weights, and compare bits, yielding after each tile.

        Takes one tile in `one_in`, beginning with `first`. Raises `RefitError`, which names the tensor that differs.
        """
        for tile in self._tiles[first % one_in :: one_in]:
            # Use as many threads as before, because a library may add in another order with a different number.
            with torch.no_grad(), _threads(self._num_threads):
                meant = torch.add(tile.base, _product(tile)).to(tile.live.dtype)
                is_same = torch.equal(_bits(meant), _bits(tile.live))
            if not is_same:
                raise RefitError(f"{tile.tensor}: the weights held are not the merge of the received base and adapter")
            yield


def _product(tile: _Tile) -> torch.Tensor:
    return (tile.b @ tile.a).mul_(tile.scale)


def _tiles(merging: Merging, memory: NamedStorages) -> Iterator[_Tile]:
    """Yield the merge as tiles of bounded size."""
    at = merging.products
    rows_M, columns_M = at.shape_MD.T
    float32_M, none_M = np.full(len(at), DTYPES.index("float32")), np.zeros(len(at), np.int64)
    item_M, wide_M = ITEM_SIZE_OF_CODE[at.dtype_M], ITEM_SIZE_OF_CODE[float32_M]

    def views(
        storage_M: Ints, offset_M: Ints, shape: tuple[Ints, Ints], strides: tuple[Ints, Ints], dtype_M: Ints
    ) -> list[torch.Tensor]:
        side = CopySide(merging.storages, storage_M, offset_M, np.stack(shape, 1), np.stack(strides, 1), dtype_M)
        return memory.views(side, merging.tensors, at.tensor_M)

    full_shape = rows_M, columns_M
    live_row_M, live_column_M = at.live_strides_MD.T
    lives = views(at.live_M, at.live_offset_M, full_shape, (live_row_M, live_column_M), at.dtype_M)
    bases = views(at.base_M, none_M, full_shape, (columns_M * item_M, item_M), at.dtype_M)
    a_s = views(at.a_M, at.a_offset_M, (at.rank_M, columns_M), (at.a_stride_M, wide_M), float32_M)
    b_s = views(at.b_M, at.b_offset_M, (rows_M, at.rank_M), (at.rank_M * wide_M, wide_M), float32_M)
    for tensor, live, base, a, b in zip(at.tensor_M.tolist(), lives, bases, a_s, b_s, strict=True):
        step = _rows_at_a_time(len(live), live.shape[1], live.device.type)
        for first in range(0, len(live), step):
            rows = slice(first, first + step)
            yield _Tile(merging.tensors[tensor], merging.scales[tensor], live[rows], base[rows], a, b[rows])


def _rows_at_a_time(num_rows: int, num_columns: int, device: str) -> int:
    """Return rows per tile such that no small rest remains: products of few rows may be added in another order."""
    num_tiles = -(-num_rows * num_columns // _TILE_ELEMENTS[device])
    return -(-num_rows // (num_tiles * _ROWS)) * _ROWS


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits for comparison: a NaN equals itself, and zero differs from minus zero."""
    return tensor.view(_WORDS[tensor.element_size()])


@contextmanager
def _threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if num != before:
        torch.set_num_threads(num)
    try:
        yield
    finally:
        if num != before:
            torch.set_num_threads(before)
