"""Quantisation of received weights into float8 with block scales, as the engine installs them.

For each block x of a region: ``scale = max|x| / largest finite number of the type`` in float32, or 1 if the block is
all zero, and ``value = x / scale`` in float32, rounded to the type. This is the block-wise scheme of DeepSeek-V3 (arXiv
2412.19437, section 3.3.2); its checkpoints name the scale ``<name>_scale_inv``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tandem.common.errors import RefitError
from tandem.refit.columns import Ints
from tandem.refit.layout import DTYPES, ITEM_SIZES
from tandem.refit.program import Quantisation, QuantizedDestinations
from tandem.refit.transports.memory import CopySide, NamedStorages


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
