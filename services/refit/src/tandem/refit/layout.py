"""Layouts: what a process holds or wants of each tensor, and where that lies in its memory.

One vocabulary for both sides: the Hugging Face name of a tensor, its global shape, and boxes of it, each with the
place in local storage where its elements lie. FSDP2 shards, tensor-parallel shards, fused ``qkv_proj`` parameters: all
of them are just boxes. An adapter, which lives with its backend and nowhere else, is a function from a model to a
`Layout`.

No torch here: the planner runs in processes without it, for models of any size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import msgspec

from tandem.common.errors import RefitError

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes an element, by the name torch gives the type."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """An axis-aligned region of a tensor: from `start`, spanning `shape` elements; a scalar has empty tuples."""

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

    def contains(self, other: Box) -> bool:
        """Say whether `other` lies inside this box; an empty box may lie on its edge."""
        if len(other.start) != len(self.start):
            return False
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

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

    @property
    def last(self) -> int:
        """Byte offset of the box's last element; the box must not be empty."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.box.shape, self.strides, strict=True))


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
    inode: int
    """Of the file behind `fd`: a number that was closed and used again leads to another file, and is refused."""


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
            for piece in tensor.pieces:
                self._check_piece(f"{who}: {name}{piece.box}", tensor, piece)
            for one, other in _overlapping([piece.box for piece in tensor.pieces]):
                raise RefitError(f"{who}: {name}{one} overlaps {other}")

    def check_writable(self, who: str) -> None:
        """Raise `RefitError` if two wanted elements share a byte of memory. After `check`."""
        places: dict[str, list[_Place]] = {}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                if piece.box.num_elements:
                    place = _Place(f"{name}{piece.box}", piece, ITEM_SIZES[tensor.dtype])
                    places.setdefault(piece.parameter, []).append(place)
        for storage, there in places.items():
            _check_disjoint(f"{who}: storage {storage!r}", there)

    def _check_piece(self, where: str, tensor: TensorLayout, piece: Piece) -> None:
        item_size = ITEM_SIZES[tensor.dtype]
        if not whole(tensor.shape).contains(piece.box) or len(piece.strides) != len(tensor.shape):
            raise RefitError(f"{where} lies outside the tensor's shape {tensor.shape}")
        storage = self.storages.get(piece.parameter)
        if storage is None:
            raise RefitError(f"{where} lies in storage {piece.parameter!r}, which is not described")
        if any(step % item_size or step < 0 for step in (piece.offset, *piece.strides)):
            raise RefitError(f"{where} has offset or strides that are not multiples of {item_size} bytes")
        if piece.box.num_elements and piece.last + item_size > storage.num_bytes:
            raise RefitError(f"{where} reaches outside storage {piece.parameter!r} of {storage.num_bytes} bytes")


def _overlapping(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield pairs of boxes that overlap, sweeping along the first dimension."""
    ordered = sorted(boxes, key=lambda box: box.start)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box.start and other.start[0] >= box.stop[0]:
                break
            if box.intersect(other):
                yield box, other


class _Place(msgspec.Struct, frozen=True):
    """Where a wanted piece is written."""

    label: str
    piece: Piece
    item_size: int


def _check_disjoint(where: str, places: list[_Place]) -> None:
    """Raise `RefitError` if the elements of places in one storage share a byte."""
    for place in places:
        dims = sorted((s, n) for n, s in zip(place.piece.box.shape, place.piece.strides, strict=True) if n > 1)
        extents = [place.item_size, *(s * n for s, n in dims)]
        if any(stride < extent for (stride, _), extent in zip(dims, extents, strict=False)):
            raise RefitError(f"{where}: elements of {place.label} share memory with each other")
    ordered = sorted(places, key=lambda place: place.piece.offset)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.piece.offset >= one.piece.last + one.item_size:
                break
            if _share_a_byte(one, other):
                raise RefitError(f"{where}: {one.label} and {other.label} share memory")


def _share_a_byte(one: _Place, other: _Place) -> bool:
    """Solve for an element of each and a byte in both: an integer equation over index ranges, exactly."""
    ranges: dict[int, tuple[int, int]] = {1: (1 - other.item_size, one.item_size - 1)}
    for place, sign in ((one, 1), (other, -1)):
        for n, stride in zip(place.piece.box.shape, place.piece.strides, strict=True):
            low, high = ranges.get(stride, (0, 0))
            ends = sorted((0, sign * (n - 1)))
            ranges[stride] = (low + ends[0], high + ends[1])
    terms = sorted(((stride, low, high) for stride, (low, high) in ranges.items()), reverse=True)
    return _is_solvable(other.piece.offset - one.piece.offset, terms)


def _is_solvable(total: int, terms: list[tuple[int, int, int]]) -> bool:
    """Say whether ``sum(stride_k * c_k) == total`` for integers ``low_k <= c_k <= high_k``; strides fall."""
    if not terms:
        return total == 0
    (stride, low, high), rest = terms[0], terms[1:]
    if stride == 0:
        return _is_solvable(total, rest)
    rest_low = sum(s * a for s, a, _ in rest)
    rest_high = sum(s * b for s, _, b in rest)
    first = max(low, -((rest_high - total) // stride))  # rounds up
    last = min(high, (total - rest_low) // stride)
    return any(_is_solvable(total - stride * c, rest) for c in range(first, last + 1))


def fingerprint(layout: Layout) -> str:
    """Return a hash of all that a plan depends on: two layouts that differ in addresses only have the same."""
    storages = {name: storage.num_bytes for name, storage in layout.storages.items()}
    encoded = msgspec.msgpack.encode((layout.host, layout.tensors, storages), order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def encode(layout: Layout) -> bytes:
    """Return the layout as msgpack."""
    return msgspec.msgpack.encode(layout)


def decode(encoded: bytes) -> Layout:
    """Read what `encode` wrote. Raises `RefitError` for anything else."""
    try:
        return msgspec.msgpack.decode(encoded, type=Layout)
    except msgspec.MsgspecError as error:
        raise RefitError(f"not a layout: {error}") from error
