"""Slices fitted to where the elements of a parameter came from.

An engine's loader puts each element of a checkpoint somewhere. What is known of a parameter afterwards is, for each of
its elements, the tensor and the indices in it. Slices say the same with a few numbers: split, fused, transposed and
padded parameters have a handful each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from tandem.common.errors import ModelError
from tandem.refit.columns import Ints
from tandem.refit.layout import Box, Layout, contiguous_strides, whole

NO_TENSOR = 0
"""Number of the elements of a parameter that come from no tensor, such as padding."""
_MOST_SLICES = 100_000
"""Slices in one parameter; a loader that needs more permutes elements one by one."""


class LandedSlice(msgspec.Struct, frozen=True, array_like=True):
    """A slice of a tensor, and its place in a parameter."""

    tensor: int
    """Number of the tensor, from 1."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    """Elements of the slice along each dimension of the tensor."""
    offset: int
    """Place of the slice's first element in the parameter, in elements."""
    strides: tuple[int, ...]
    """Elements of the parameter between neighbours along each dimension of the slice."""

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the slice's elements in a contiguous parameter, of the slice's shape."""
        return parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)

    @property
    def box(self) -> Box:
        """The slice of the tensor."""
        return Box(self.start, self.shape)


class RegionNumbers(Protocol):
    """A number for each element of a parameter: a tensor of them, or what reads those of a region when asked."""

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""

    def __getitem__(self, region: tuple[int | slice, ...], /) -> torch.Tensor:
        """Return the numbers of a region."""


def fit_slices(
    number_S: RegionNumbers, indices_DS: Sequence[RegionNumbers], num_dims: Mapping[int, int], *, by_lines: bool = False
) -> list[LandedSlice]:
    """Return slices that cover all elements of a parameter that come from a tensor.

    Args:
        number_S: number of the tensor that each element comes from, of the parameter's shape.
        indices_DS: its index along each dimension of that tensor; those of dimensions that the tensor lacks are
            ignored.
        num_dims: dimensions of each tensor, by number.
        by_lines: whether lines through a block stand for all of it where they fit. It is much faster, and what is
            inside such a block is still to be proven.

    Raises:
        KeyError: an element comes from no tensor of `num_dims`.
        ModelError: the elements lie in no few slices.

    """
    strides = contiguous_strides(number_S.shape, 1)
    slices: list[LandedSlice] = []
    regions = [whole(number_S.shape)] if math.prod(number_S.shape) else []
    while regions:
        region = regions.pop()
        number = int(number_S[region.start])
        dims = range(num_dims[number] if number != NO_TENSOR else 0)
        block, axes = _grow(region, number_S, [indices_DS[dim] for dim in dims], by_lines=by_lines)
        if number != NO_TENSOR:
            shape, steps = [1] * len(dims), [0] * len(dims)
            for axis, dim in axes.items():
                shape[dim], steps[dim] = block.shape[axis], strides[axis]
            start = tuple(int(indices_DS[dim][block.start]) for dim in dims)
            offset = sum(place * stride for place, stride in zip(block.start, strides, strict=True))
            slices.append(LandedSlice(number, start, tuple(shape), offset, tuple(steps)))
            if len(slices) > _MOST_SLICES:
                raise ModelError(f"its elements lie in more than {_MOST_SLICES} slices")
        regions.extend(region.subtract(block))
    return slices


def _grow(
    region: Box, number_S: RegionNumbers, indices_DS: Sequence[RegionNumbers], *, by_lines: bool
) -> tuple[Box, dict[int, int]]:
    """Return the block at a region's first corner that one slice fills, or that comes from no tensor, and the tensor's
    dimension along each axis of the block along which it moves.

    Lines from the corner say how far it may reach. Where the block between them is not all of one slice, it is cut.
    """
    corner, extents = region.start, [1] * len(region.shape)
    axes: dict[int, int] = {}
    for axis in reversed(range(len(region.shape))):
        line = tuple(
            slice(place, place + region.shape[axis]) if each == axis else place for each, place in enumerate(corner)
        )
        is_same_N = number_S[line] == number_S[corner]
        if indices_DS and len(is_same_N) > 1:
            index_DN = torch.stack([index[line] for index in indices_DS]).long()
            steps = (index_DN[:, 1] - index_DN[:, 0]).tolist()
            moving = [dim for dim, step in enumerate(steps) if step]
            if len(moving) != 1 or steps[moving[0]] != 1 or moving[0] in axes.values():
                continue
            along_N = torch.arange(len(is_same_N), device=is_same_N.device)
            expected_DN = index_DN[:, :1].expand_as(index_DN).clone()
            expected_DN[moving[0]] += along_N
            is_same_N = is_same_N & (index_DN == expected_DN).all(dim=0)
            if bool(is_same_N[1]):
                axes[axis] = moving[0]
        extents[axis] = _count_leading(is_same_N)
    block = Box(corner, tuple(extents))
    by_lines = by_lines and bool(indices_DS)  # what comes from no tensor has none to be proven by
    if by_lines and all(bool(_find_fitting(block, axes, number_S, indices_DS, line).all()) for line in _lines(block)):
        return block, axes
    fits_B = _find_fitting(block, axes, number_S, indices_DS, block)
    for axis in range(len(extents)):
        if bool(fits_B.all()):
            break
        crossing = [each for each in range(len(extents)) if each != axis]
        leading_N = fits_B.all(dim=crossing) if crossing else fits_B
        extents[axis] = max(1, _count_leading(leading_N))
        fits_B = fits_B.narrow(axis, 0, extents[axis])
    return Box(corner, tuple(extents)), {axis: dim for axis, dim in axes.items() if extents[axis] > 1}


def _lines(block: Box) -> Iterator[Box]:
    """Yield lines along each axis of a block: through its last corner, and through its middle."""
    for point in (
        [stop - 1 for stop in block.stop],
        [a + n // 2 for a, n in zip(block.start, block.shape, strict=True)],
    ):
        for axis, extent in enumerate(block.shape):
            start = (*point[:axis], block.start[axis], *point[axis + 1 :])
            yield Box(start, tuple(extent if each == axis else 1 for each in range(len(point))))


def _find_fitting(
    block: Box, axes: Mapping[int, int], number_S: RegionNumbers, indices_DS: Sequence[RegionNumbers], part: Box
) -> torch.Tensor:
    """Return which elements of a part of a block are those of one slice from the block's corner on, of the part's
    shape."""
    fits_B = number_S[part.region] == number_S[block.start]
    axis_of = {dim: axis for axis, dim in axes.items()}
    for dim, index_S in enumerate(indices_DS):
        expected: torch.Tensor | int = int(index_S[block.start])
        if dim in axis_of:
            axis = axis_of[dim]
            steps_N = torch.arange(part.shape[axis], device=fits_B.device) + (part.start[axis] - block.start[axis])
            expected = (expected + steps_N).reshape([-1 if each == axis else 1 for each in range(len(block.shape))])
        fits_B &= index_S[part.region] == expected
    return fits_B


def _count_leading(is_same_N: torch.Tensor) -> int:
    """Return how many elements come before the first that is false."""
    return int(is_same_N.long().cumprod(dim=0).sum())


def check_all_is_held(layouts: Sequence[Layout]) -> None:
    """Check that each tensor that the workers of one engine name is whole in them. Raises `ModelError`."""
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, set[Box]] = {}
    for layout in layouts:
        for tensor in layout.tensors:
            shapes[tensor.name] = tensor.shape
        for row, index in enumerate(layout.pieces.tensor_P.tolist()):
            boxes.setdefault(layout.tensors[index].name, set()).add(layout.piece(row).box)
    for name, shape in shapes.items():
        hole = _find_hole(shape, boxes.get(name, set()))
        if hole is not None:
            raise ModelError(f"vLLM takes nothing of {name}{hole}, so that refits would not bring it")


def _find_hole(shape: Sequence[int], boxes: Collection[Box]) -> Box | None:
    """Return a part of a tensor that no box covers, or None."""
    if any(box.shape == tuple(shape) for box in boxes):
        return None
    edges: list[Ints] = [
        np.unique([0, n, *(place for box in boxes for place in (box.start[dim], box.stop[dim]))])
        for dim, n in enumerate(shape)
    ]
    is_covered = np.zeros([len(edges_N) - 1 for edges_N in edges], np.bool_)
    for box in boxes:
        first = [int(np.searchsorted(edges_N, place)) for edges_N, place in zip(edges, box.start, strict=True)]
        stop = [int(np.searchsorted(edges_N, place)) for edges_N, place in zip(edges, box.stop, strict=True)]
        is_covered[tuple(map(slice, first, stop))] = True
    if is_covered.all():
        return None
    cell = np.unravel_index(int(np.argmin(is_covered)), is_covered.shape)
    start = tuple(int(edges_N[at]) for edges_N, at in zip(edges, cell, strict=True))
    end = tuple(int(edges_N[at + 1]) for edges_N, at in zip(edges, cell, strict=True))
    return Box(start, tuple(b - a for a, b in zip(start, end, strict=True)))
