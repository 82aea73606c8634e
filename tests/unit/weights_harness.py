"""Random shardings of random tensors, held in numpy memory, and a plain interpreter of transfer programs."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from numpy.typing import NDArray

from tandem.refit.layout import (
    Box,
    Layout,
    Piece,
    PrivateMemory,
    SharedMemory,
    Storage,
    TensorLayout,
    contiguous_strides,
)
from tandem.refit.program import Copy, Region, TransferProgram

HOST = "here"
NUMPY_TYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "int32": np.dtype(np.int32)}
"""Types that numpy rounds as torch does."""

Memory = dict[str, NDArray[np.uint8]]
"""The bytes of one process's storages."""


def reference(name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """The whole tensor: its values differ from element to element and from tensor to tensor."""
    seed = np.random.default_rng([len(name), *name.encode()])
    values = seed.permutation(4 * max(1, int(np.prod(shape))))[: int(np.prod(shape))].reshape(shape)
    return values.astype(NUMPY_TYPES[dtype])


def cut(boxes: list[Box], dim: int, edges: list[int]) -> list[Box]:
    """Cut every box at the given indices of one dimension."""
    for edge in edges:
        parts: list[Box] = []
        for box in boxes:
            if box.start[dim] < edge < box.stop[dim]:
                length = edge - box.start[dim]
                first, rest = list(box.shape), list(box.shape)
                first[dim], rest[dim] = length, box.shape[dim] - length
                start = list(box.start)
                start[dim] = edge
                parts += [Box(box.start, tuple(first)), Box(tuple(start), tuple(rest))]
            else:
                parts.append(box)
        boxes = parts
    return boxes


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that cover a tensor exactly, as meshes of uneven shards do."""
    boxes = [Box((0,) * len(shape), shape)]
    for dim, size in enumerate(shape):
        boxes = cut(boxes, dim, draw(st.lists(st.integers(1, max(1, size - 1)), max_size=2)))
    return boxes


def place(
    storage: str, box: Box, order: tuple[int, ...], item_size: int, offset: int, row_gap: int
) -> tuple[Piece, int]:
    """Lay a box out at `offset` with its dimensions in the given order; return it and one past its last byte.

    `row_gap` items are left free after each row, as a column shard of a wider matrix has them.
    """
    inner_first = [box.shape[dim] for dim in order]
    if row_gap and inner_first:
        inner_first[-1] += row_gap
    by_order = contiguous_strides(inner_first, item_size)
    strides = [0] * len(order)
    for dim, stride in zip(order, by_order, strict=True):
        strides[dim] = stride
    piece = Piece(box, storage, offset, tuple(strides))
    return piece, piece.last + item_size


@st.composite
def holders(
    draw: st.DrawFn, members: list[str], tensors: dict[str, tuple[tuple[int, ...], str]], *, is_source: bool
) -> dict[str, Layout]:
    """Draw what each member holds: every tensor is tiled, and every tile is held by at least one member.

    Tiles share storages or have their own, lie in any order of dimensions, with gaps before and within.
    """
    pieces: dict[str, dict[str, list[Piece]]] = {member: {name: [] for name in tensors} for member in members}
    ends: dict[str, dict[str, int]] = {member: {} for member in members}
    for name, (shape, dtype) in tensors.items():
        item_size = NUMPY_TYPES[dtype].itemsize
        for box in draw(tilings(shape)):
            who = draw(st.lists(st.sampled_from(members), min_size=1, max_size=len(members), unique=True))
            for member in who:
                storage = draw(st.sampled_from([name, "fused"]))
                order = draw(st.permutations(range(len(shape))))
                start = ends[member].get(storage, 0) + draw(st.sampled_from([0, 0, 8]))
                start = -(-start // 8) * 8 if draw(st.booleans()) else -(-start // item_size) * item_size
                gap = draw(st.sampled_from([0, 0, 3]))
                piece, ends[member][storage] = place(storage, box, tuple(order), item_size, start, gap)
                pieces[member][name].append(piece)
    return {
        member: Layout(
            host=HOST,
            tensors={
                name: TensorLayout(shape, dtype, tuple(pieces[member][name]))
                for name, (shape, dtype) in tensors.items()
            },
            storages={
                storage: Storage(-(-end // 8) * 8, SharedMemory(number, index, 7) if is_source else PrivateMemory())
                for index, (storage, end) in enumerate(ends[member].items())
            },
        )
        for number, member in enumerate(members)
    }


def empty_memory(layout: Layout, fill: int) -> Memory:
    return {name: np.full(storage.num_bytes, fill, np.uint8) for name, storage in layout.storages.items()}


def window(memory: NDArray[np.uint8], dtype: str, offset: int, strides: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """A strided view of bytes; numpy refuses one that reaches outside."""
    return np.ndarray(shape, NUMPY_TYPES[dtype], memory, offset, strides)


def piece_view(memory: Memory, tensor: TensorLayout, piece: Piece) -> Any:
    return window(memory[piece.parameter], tensor.dtype, piece.offset, piece.strides, piece.box.shape)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def fill(layout: Layout) -> Memory:
    """Lay the reference tensors out as the layout says; what no piece covers is 0xEE."""
    memory = empty_memory(layout, 0xEE)
    for name, tensor in layout.tensors.items():
        for piece in tensor.pieces:
            piece_view(memory, tensor, piece)[...] = reference(name, tensor.shape, tensor.dtype)[slices(piece.box)]
    return memory


def region_view(memory: NDArray[np.uint8], region: Region, shape: tuple[int, ...]) -> Any:
    return window(memory, region.dtype, region.offset, region.strides, shape)


def run(program: TransferProgram, sources: dict[str, Memory], destination: Memory) -> dict[str, NDArray[np.uint16]]:
    """Carry a program out in numpy; return how often each byte of each destination storage was written."""
    written = {name: np.zeros(memory.size, np.uint16) for name, memory in destination.items()}
    for copy in program.copies:
        source = program.sources[copy.source]
        values = region_view(sources[source.member][source.storage], copy.source_region, copy.shape)
        region_view(destination[copy.destination], copy.destination_region, copy.shape)[...] = values
        _bytes_of(written[copy.destination], copy)[...] += 1
    for alias in program.aliases:
        source = program.sources[alias.source]
        there = sources[source.member][source.storage][alias.offset : alias.offset + alias.num_bytes]
        destination[alias.destination][...] = there
        written[alias.destination] += 1
    return written


def _bytes_of(counts: NDArray[np.uint16], copy: Copy) -> Any:
    """The counters of the bytes a copy writes: one more dimension, the bytes of an element."""
    region, item_size = copy.destination_region, NUMPY_TYPES[copy.destination_region.dtype].itemsize
    strides = tuple(2 * stride for stride in region.strides)
    return np.ndarray((*copy.shape, item_size), np.uint16, counts, 2 * region.offset, (*strides, 2))
