"""Weights as the engine installs them: merged with low-rank adapters, quantised into float8.

Merging: for each slice of a weight, ``live = base + scale * (b @ a)``. The product is computed and scaled in float32,
and the sum is rounded once to the weight's element type. These are the operations of peft's ``merge_and_unload``, in
its order, with adapters in float32, as peft keeps them. Each merge starts from the base, so a version does not depend
on earlier ones.

Quantising: for each block x of a region, ``scale = max|x| / largest finite number of the type`` in float32, or 1 if the
block is all zero, and ``value = x / scale`` in float32, rounded to the type. This is the block-wise scheme of
DeepSeek-V3 (arXiv 2412.19437, section 3.3.2); its checkpoints name the scale ``<name>_scale_inv``.
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
from tandem.refit.layout import DTYPES, ITEM_SIZE_OF_CODE, ITEM_SIZES
from tandem.refit.program import Merging, Quantisation, QuantizedDestinations
from tandem.refit.transports.memory import CopySide, NamedStorages

_TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Approximate elements of a product computed at a time, which bounds the memory of merging."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes."""
_ROWS = 64
"""Rows of a tile are a multiple of this."""


class _Place(NamedTuple):
    """Destination of a slice of a region's values or scales."""

    box: tuple[slice, ...]
    destination: torch.Tensor


class _Region(NamedTuple):
    tensor: str
    source: torch.Tensor
    values: list[_Place]
    scales: list[_Place]


class BoundQuantisation:
    """A `Quantisation` bound to memory."""

    def __init__(self, quantisation: Quantisation, memory: NamedStorages) -> None:
        """Bind to memory. Raises `RefitError` if it differs from the plan."""
        self._dtype: torch.dtype = getattr(torch, quantisation.dtype)
        self._block = quantisation.block
        at = quantisation.regions
        names = quantisation.tensors
        codes_Q = np.full(len(at), DTYPES.index(quantisation.staging_dtype), np.int64)
        strides_QD = _row_major(at.shape_QD) * ITEM_SIZES[quantisation.staging_dtype]
        side = CopySide((quantisation.staging,), np.zeros_like(codes_Q), at.offset_Q, at.shape_QD, strides_QD, codes_Q)
        self._regions = [
            _Region(names[tensor], source, [], [])
            for tensor, source in zip(at.tensor_Q.tolist(), memory.views(side, names, at.tensor_Q), strict=True)
        ]
        for places, dtype, of in (
            (quantisation.values, quantisation.dtype, "values"),
            (quantisation.scales, quantisation.scales_dtype, "scales"),
        ):
            views = _views_of(places, dtype, quantisation, memory)
            rows = zip(places.region_R.tolist(), places.start_RD.tolist(), places.shape_RD.tolist(), views, strict=True)
            for region, start, shape, view in rows:
                box = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
                getattr(self._regions[region], of).append(_Place(box, view))

    @torch.no_grad()
    def run(self) -> None:
        """Quantise every region into its destinations."""
        for region in self._regions:
            values, scales = quantise(region.source, self._block, self._dtype)
            for place in region.values:
                place.destination.copy_(values[place.box])
            for place in region.scales:
                place.destination.copy_(scales[place.box])

    @torch.no_grad()
    def wrong(self) -> tuple[str, ...]:
        """Quantise again, and return the tensors with held values or scales that differ in any bit."""
        tensors: dict[str, None] = {}
        for region in self._regions:
            values, scales = quantise(region.source, self._block, self._dtype)
            for meant, places in ((values, region.values), (scales, region.scales)):
                for place in places:
                    if not _same_bits(place.destination, meant[place.box].to(place.destination.dtype)):
                        tensors[region.tensor] = None
        return tuple(tensors)


def quantise(x: torch.Tensor, block: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values of `dtype` and of the shape of `x`, and one float32 scale per block: ``ceil(shape / block)``.

    `block` applies to the last dimensions; along those before it, each index has its own blocks. Blocks are cut off at
    the end of `x`. Elements that are not finite give their block a scale that is not finite, which shows in a digest or
    a forward pass.
    """
    if len(block) > x.dim():
        raise RefitError(f"blocks of {block} do not fit a tensor of {x.dim()} dimensions")
    sizes = (1,) * (x.dim() - len(block)) + tuple(block)
    num = [-(-n // size) for n, size in zip(x.shape, sizes, strict=True)]
    wide = x.float()
    missing = [m * size - n for m, size, n in zip(num, sizes, x.shape, strict=True)]
    if any(missing):
        wide = torch.nn.functional.pad(wide, [pad for n in reversed(missing) for pad in (0, n)])
    # Split each dimension into two: the block, and the position in it.
    blocked = wide.view([n for pair in zip(num, sizes, strict=True) for n in pair])
    inner = tuple(range(1, blocked.dim(), 2))
    largest = blocked.abs().amax(inner, keepdim=True)
    # A GPU multiplies by the inverse of a number, which rounds otherwise; it divides by a tensor as a CPU does.
    scale = torch.where(largest == 0, 1.0, largest / largest.new_full((), torch.finfo(dtype).max))
    values = (blocked / scale).to(dtype).view(wide.shape)
    return values[tuple(slice(n) for n in x.shape)], scale.view(num)


def _views_of(
    places: QuantizedDestinations, dtype: str, quantisation: Quantisation, memory: NamedStorages
) -> list[torch.Tensor]:
    codes_R = np.full(len(places), DTYPES.index(dtype), np.int64)
    side = CopySide(
        quantisation.storages, places.storage_R, places.offset_R, places.shape_RD, places.strides_RD, codes_R
    )
    return memory.views(side, quantisation.tensors, quantisation.regions.tensor_Q[places.region_R])


def _row_major(shape_QD: Ints) -> Ints:
    """Return row-major strides, in elements, without gaps."""
    after_QD = np.concatenate([shape_QD[:, 1:], np.ones((len(shape_QD), min(1, shape_QD.shape[1])), np.int64)], axis=1)
    strides_QD: Ints = np.cumprod(after_QD[:, ::-1], axis=1)[:, ::-1]
    return strides_QD


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits: a NaN equals itself, and zero differs from minus zero."""
    as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(*as_bytes)


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
