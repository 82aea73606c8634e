"""Layouts: what a process holds or wants of each tensor, and where that lies in its memory.

One vocabulary for both sides: the Hugging Face name of a tensor, its global shape, and boxes of it, each with the place
in local storage where its elements lie. FSDP2 shards, tensor-parallel shards, fused ``qkv_proj`` parameters: all of
them are just boxes. An adapter, which lives with its backend and nowhere else, is a function from a model to a `Layout`.

No torch here: the planner runs in processes without it, for models of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from tandem.common.errors import RefitError

ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
"""Bytes an element, by the name torch gives the type."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """An axis-aligned region of a tensor: it starts at `start` and spans `shape` elements. A scalar has empty tuples."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index along each dimension."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return what both boxes hold, or None."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a, b) - c for a, b, c in zip(self.stop, other.stop, start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def without(self, hole: Box) -> Iterator[Box]:
        """Yield disjoint boxes that cover this one except `hole`, which must lie inside it."""
        start, stop = list(self.start), list(self.stop)
        for dim, (hole_start, hole_stop) in enumerate(zip(hole.start, hole.stop, strict=True)):
            for a, b in ((start[dim], hole_start), (hole_stop, stop[dim])):
                if a < b:
                    piece_start, piece_stop = [*start], [*stop]
                    piece_start[dim], piece_stop[dim] = a, b
                    yield Box(tuple(piece_start), tuple(map(int.__sub__, piece_stop, piece_start)))
            start[dim], stop[dim] = hole_start, hole_stop

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def contiguous_strides(shape: Sequence[int], item_size: int) -> tuple[int, ...]:
    """Return the byte strides of a row-major array."""
    strides: list[int] = []
    step = item_size
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A box of the global tensor and where it lies in local storage."""

    box: Box
    parameter: str
    """Name of the local storage, a key of `Layout.storages`."""
    offset: int
    """Byte offset of the box's first element in that storage."""
    strides: tuple[int, ...]
    """Bytes between neighbours along each dimension of the box."""

    def offset_of(self, inner: Box) -> int:
        """Return the byte offset of the first element of a box inside this one."""
        steps = zip(inner.start, self.box.start, self.strides, strict=True)
        return self.offset + sum((a - b) * stride for a, b, stride in steps)


class TensorLayout(msgspec.Struct, frozen=True):
    """What this process holds or wants of one tensor. Pieces do not overlap; together they may cover only a part."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Name of the element type as torch spells it, such as ``bfloat16``."""
    pieces: tuple[Piece, ...]


class SharedMemory(msgspec.Struct, frozen=True, tag=True):
    """A storage that other processes of the host can map: ``/proc/<pid>/fd/<fd>``.

    The memory has no name in any file system, so nothing is left of it when the last process that maps it has exited,
    however it exited.
    """

    pid: int
    fd: int


class PrivateMemory(msgspec.Struct, frozen=True, tag=True):
    """A storage that only its own process can reach, such as an engine's parameters."""


Address = SharedMemory | PrivateMemory


class Storage(msgspec.Struct, frozen=True):
    """A contiguous range of bytes in one process."""

    num_bytes: int
    address: Address


class Layout(msgspec.Struct, frozen=True):
    """Everything one process holds or wants."""

    host: str
    """Where the process runs; two processes of one host can share memory."""
    tensors: dict[str, TensorLayout]
    """By Hugging Face name. Tied tensors appear once, under the name they are stored by."""
    storages: dict[str, Storage]

    def check(self, who: str) -> None:
        """Raise `RefitError` if a piece lies outside its tensor or its storage, or overlaps another of its tensor."""
        for name, tensor in self.tensors.items():
            if tensor.dtype not in ITEM_SIZES:
                raise RefitError(f"{who}: {name} has element type {tensor.dtype!r}; known are {', '.join(ITEM_SIZES)}")
            for index, piece in enumerate(tensor.pieces):
                self._check_piece(f"{who}: {name}{piece.box}", tensor, piece)
                for other in tensor.pieces[:index]:
                    if piece.box.intersect(other.box):
                        raise RefitError(f"{who}: {name}{piece.box} overlaps {other.box}")

    def _check_piece(self, where: str, tensor: TensorLayout, piece: Piece) -> None:
        if piece.box.intersect(whole(tensor.shape)) != piece.box:
            raise RefitError(f"{where} lies outside the tensor's shape {tensor.shape}")
        storage = self.storages.get(piece.parameter)
        if storage is None:
            raise RefitError(f"{where} lies in storage {piece.parameter!r}, which is not described")
        last = piece.offset + sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))
        if piece.offset < 0 or last + ITEM_SIZES[tensor.dtype] > storage.num_bytes:
            raise RefitError(f"{where} reaches outside storage {piece.parameter!r} of {storage.num_bytes} bytes")


def encode(layout: Layout) -> bytes:
    """Return the layout as msgpack."""
    return msgspec.msgpack.encode(layout)


def decode(encoded: bytes) -> Layout:
    """Read what `encode` wrote. Raises `RefitError` for anything else."""
    try:
        return msgspec.msgpack.decode(encoded, type=Layout)
    except msgspec.MsgspecError as error:
        raise RefitError(f"not a layout: {error}") from error
