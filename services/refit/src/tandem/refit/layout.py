"""Layouts: the tensors that a process holds or wants, and their places in its memory.

Both sides use one vocabulary: the Hugging Face name of a tensor, its global shape, and slices of it, each with its
place in local storage. FSDP2 shards, tensor-parallel shards and fused ``qkv_proj`` parameters are all just slices. An
adapter is a function from a model to a `Layout`, built with a `LayoutBuilder`; it is the only code that knows its
backend.

A layout stores its pieces as columns (`PieceColumns`), because a large mixture of experts has millions of them. `Box`
and `LayoutPiece` describe them one at a time, for people, tests and error messages.

No torch here: the planner runs in processes without it, for models of any size.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from tandem.common.errors import RefitError
from tandem.refit import columns
from tandem.refit.columns import ColumnTable, Ints, pad_dims

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
"""Bytes per element, by torch's name of the type."""

DTYPES = tuple(ITEM_SIZES)
"""Element types in the order of their codes in tables."""

ITEM_SIZE_OF_CODE = np.array([ITEM_SIZES[dtype] for dtype in DTYPES])
"""Bytes per element, by code of the element type."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A slice of a tensor: axis-aligned, from `start`, with `shape` elements; a scalar's has empty tuples."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index along each dimension."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def region(self) -> tuple[slice, ...]:
        """Index of the slice in the global tensor."""
        return tuple(map(slice, self.start, self.stop))

    def contains(self, box: Box) -> bool:
        """Return whether `box` lies inside this slice; an empty one may lie on its edge."""
        if len(box.start) != len(self.start):
            return False
        return all(a <= b for a, b in zip(self.start, box.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, box.stop, strict=True)
        )

    def intersect(self, box: Box) -> Box | None:
        """Return the intersection of both slices, or None."""
        start = tuple(map(max, self.start, box.start))
        shape = tuple(min(a, b) - c for a, b, c in zip(self.stop, box.stop, start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def subtract(self, hole: Box) -> Iterator[Box]:
        """Yield disjoint slices that cover this one except `hole`, which must lie inside it."""
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
    """Return the slice that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def contiguous_strides(shape: Sequence[int], item_size: int) -> tuple[int, ...]:
    """Return the byte strides of a row-major array."""
    strides: list[int] = []
    step = item_size
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class LayoutPiece(msgspec.Struct, frozen=True, array_like=True):
    """A slice of the global tensor and its place in local storage."""

    box: Box
    parameter: str
    """Name of the local storage, one of `Layout.storages`."""
    offset: int
    """Byte offset of the slice's first element in that storage."""
    strides: tuple[int, ...]
    """Bytes between neighbours along each dimension of the slice."""

    def offset_of(self, inner: Box) -> int:
        """Return the byte offset of the first element of a slice inside this one."""
        steps = zip(inner.start, self.box.start, self.strides, strict=True)
        return self.offset + sum((a - b) * stride for a, b, stride in steps)

    @property
    def last(self) -> int:
        """Byte offset of the slice's last element; the slice must not be empty."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.box.shape, self.strides, strict=True))


class Tensor(msgspec.Struct, frozen=True):
    """A global tensor, independent of its sharding."""

    name: str
    """Name in a Hugging Face checkpoint. Tied tensors appear once, under the name in the checkpoint."""
    shape: tuple[int, ...]
    dtype: str
    """Element type by torch's name, such as ``bfloat16``."""
    block: tuple[int, ...] = ()
    """Shape of the blocks that share a scale, such as ``(128, 128)``; empty if not quantised."""
    scales: str = ""
    """Name of the tensor of scales, of shape ``ceil(shape / block)``: element = value × its block's scale."""
    is_frozen: bool = False
    """Whether a trainer never changes its elements while it runs."""
    product_scale: float = 0.0
    """Scale of the product of a trainer's ``lora_B`` and ``lora_A`` when it is added to the weight."""


class SharedMemory(msgspec.Struct, frozen=True, tag=True):
    """A storage that other processes of the host can map: ``/proc/<pid>/fd/<fd>``.

    The memory has no name in any file system, so it disappears with the last process that maps it, however that exits.
    """

    pid: int
    fd: int
    inode: int
    """Inode of the file behind `fd`: if the number was closed and reused, it leads to another file and is refused."""


class CudaMemory(msgspec.Struct, frozen=True, tag=True):
    """A storage in GPU memory that other processes of the host can open through CUDA IPC."""

    pid: int
    device: str
    """UUID of the GPU."""
    handle: bytes
    """``cudaIpcMemHandle_t`` of the allocation that contains the storage."""
    offset: int
    """Offset of the storage's first byte in that allocation."""


class UnpeeredCudaMemory(CudaMemory, frozen=True, tag=True):
    """A storage on a GPU that some other GPU of the host cannot access: only processes on the same GPU open it."""


class PrivateMemory(msgspec.Struct, frozen=True, tag=True):
    """A storage that only its own process can access, such as an engine's parameters."""


class StoreMemory(msgspec.Struct, frozen=True, tag=True):
    """A storage of which a trainer writes each version to a store (``refit.store``)."""

    writer: str
    """Folder of the trainer's versions in the store; no other process, and no later one, writes to it."""


Address = SharedMemory | CudaMemory | UnpeeredCudaMemory | PrivateMemory | StoreMemory

KINDS_OF_MEMORY: tuple[type[Address], ...] = (PrivateMemory, SharedMemory, CudaMemory, UnpeeredCudaMemory, StoreMemory)
"""Kinds of memory in the order of their codes in tables."""


class Storage(msgspec.Struct, frozen=True):
    """A contiguous range of bytes in one process."""

    name: str
    num_bytes: int
    address: Address


class PieceColumns(ColumnTable, frozen=True, eq=False):
    """Pieces as columns: P rows, D the largest number of dimensions, right-aligned.

    Missing dimensions come first, with start 0, shape 1, stride 0. No piece is empty.
    """

    tensor_P: Ints
    """Index into `Layout.tensors`."""
    storage_P: Ints
    """Index into `Layout.storages`."""
    start_PD: Ints
    shape_PD: Ints
    offset_P: Ints
    """Offsets in bytes."""
    strides_PD: Ints
    """Strides in bytes."""


class Layout(msgspec.Struct, frozen=True):
    """All that one process holds or wants. Pieces of a tensor do not overlap, and need not cover it."""

    host: str
    """Host of the process; processes of one host can share memory and count as one node."""
    device: str
    """``cpu``, or the UUID of the GPU with the storages."""
    tensors: tuple[Tensor, ...]
    """Tensors of the pieces and possibly others, so that ranks can share one tuple."""
    storages: tuple[Storage, ...]
    pieces: PieceColumns

    def pieces_of(self, name: str) -> tuple[LayoutPiece, ...]:
        """Return the pieces of one tensor. Raises `KeyError` if the layout does not name it."""
        index = {tensor.name: index for index, tensor in enumerate(self.tensors)}[name]
        return tuple(self.piece(int(row)) for row in np.flatnonzero(self.pieces.tensor_P == index))

    def piece(self, row: int) -> LayoutPiece:
        """Return one row of `pieces`."""
        at = self.pieces
        num_dims = len(self.tensors[at.tensor_P[row]].shape)
        start, shape, strides = (
            tuple(column_PD[row, column_PD.shape[1] - num_dims :].tolist())
            for column_PD in (at.start_PD, at.shape_PD, at.strides_PD)
        )
        storage = self.storages[at.storage_P[row]].name
        return LayoutPiece(Box(start, shape), storage, int(at.offset_P[row]), strides)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that a plan depends on; it ignores addresses within one kind of memory."""
        return fingerprint(self)


class LayoutBuilder:
    """Builder of a layout from single pieces or families of pieces."""

    def __init__(self, host: str, device: str = "cpu") -> None:
        self._host = host
        self._device = device
        self._tensors: tuple[Tensor, ...] | list[Tensor] = []
        self._storages: list[Storage] = []
        self._families: list[PieceColumns] = []
        self._singles: list[tuple[int, Box, int, int, tuple[int, ...]]] = []

    def tensor(
        self, name: str, shape: Sequence[int], dtype: str, *, block: Sequence[int] = (), scales: str = ""
    ) -> int:
        """Add a tensor; return its index."""
        if isinstance(self._tensors, tuple):
            self._tensors = list(self._tensors)
        self._tensors.append(Tensor(name, tuple(shape), dtype, tuple(block), scales))
        return len(self._tensors) - 1

    def add_tensors(self, tensors: tuple[Tensor, ...]) -> int:
        """Add many tensors; return the index of the first. The first tuple is kept unchanged, so ranks can share it."""
        first = len(self._tensors)
        self._tensors = [*self._tensors, *tensors] if first else tensors
        return first

    def storage(self, name: str, num_bytes: int, address: Address | None = None) -> int:
        """Add a storage, private unless an address is given; return its index."""
        self._storages.append(Storage(name, num_bytes, PrivateMemory() if address is None else address))
        return len(self._storages) - 1

    def add(self, tensor: int, box: Box, storage: int, offset: int, strides: Sequence[int]) -> None:
        """Add one piece, unless it is empty. Offset and strides are in bytes."""
        self._singles.append((tensor, box, storage, offset, tuple(strides)))

    def add_many(self, tensor: Any, start: Any, shape: Any, storage: Any, offset: Any, strides: Any) -> None:
        """Add a family of pieces of tensors with the same number of dimensions d.

        Args:
            tensor: indices, of shape ``(P,)`` or one for all; likewise `storage` and `offset`.
            start: of shape ``(P, d)``, or ``(d,)`` for all; likewise `shape` and `strides`.
            shape: like `start`; pieces without elements are left out.
            storage: like `tensor`.
            offset: like `tensor`, in bytes.
            strides: like `start`, in bytes.

        """
        rows = [np.asarray(values, np.int64) for values in (tensor, storage, offset)]
        dims = [np.asarray(values, np.int64) for values in (start, shape, strides)]
        num = np.broadcast_shapes(*(v.shape[:1] for v in rows), *(v.shape[:1] for v in dims if v.ndim == 2), (1,))[0]
        tensor_P, storage_P, offset_P = (np.broadcast_to(values, (num,)) for values in rows)
        num_dims = max(values.shape[-1] for values in dims)
        start_PD, shape_PD, strides_PD = (np.broadcast_to(values, (num, num_dims)) for values in dims)
        self._families.append(PieceColumns(tensor_P, storage_P, start_PD, shape_PD, offset_P, strides_PD))

    def copy(self) -> LayoutBuilder:
        """Return a builder that has the same tensors, storages and pieces, and gets others."""
        builder = copy.copy(self)
        for name in ("_tensors", "_storages", "_families", "_singles"):
            entries = getattr(self, name)
            setattr(builder, name, entries if isinstance(entries, tuple) else list(entries))
        return builder

    def build(self) -> Layout:
        """Return the layout."""
        families = [*self._families, *self._single_families()]
        num_dims = max((family.start_PD.shape[1] for family in families), default=0)
        no_rows = PieceColumns(
            *(np.zeros((0, num_dims) if f.endswith("D") else 0, np.int64) for f in PieceColumns.__struct_fields__)
        )
        padded = [no_rows]
        for family in families:
            rows = family.rows((family.shape_PD > 0).all(axis=1))
            padded.append(
                msgspec.structs.replace(
                    rows,
                    start_PD=pad_dims(rows.start_PD, num_dims, 0),
                    shape_PD=pad_dims(rows.shape_PD, num_dims, 1),
                    strides_PD=pad_dims(rows.strides_PD, num_dims, 0),
                )
            )
        joined = (np.concatenate([getattr(p, field) for p in padded]) for field in PieceColumns.__struct_fields__)
        return Layout(self._host, self._device, tuple(self._tensors), tuple(self._storages), PieceColumns(*joined))

    def _single_families(self) -> Iterator[PieceColumns]:
        """Yield the pieces that were added singly, grouped by number of dimensions."""
        by_num_dims: dict[int, list[tuple[int, Box, int, int, tuple[int, ...]]]] = {}
        for single in self._singles:
            num_dims = len(self._tensors[single[0]].shape)
            if {len(single[1].start), len(single[1].shape), len(single[4])} != {num_dims}:
                raise RefitError(f"{self._tensors[single[0]].name}{single[1]} has the wrong number of dimensions")
            by_num_dims.setdefault(num_dims, []).append(single)
        for num_dims, singles in by_num_dims.items():
            tensors, boxes, storages, offsets, strides = zip(*singles, strict=True)
            tensor_P, storage_P, offset_P = (np.array(values, np.int64) for values in (tensors, storages, offsets))
            start_PD, shape_PD, strides_PD = (
                np.array(values, np.int64).reshape(len(singles), num_dims)
                for values in ([box.start for box in boxes], [box.shape for box in boxes], strides)
            )
            yield PieceColumns(tensor_P, storage_P, start_PD, shape_PD, offset_P, strides_PD)


def fingerprint(layout: Layout) -> str:
    """Return a hash of everything that a plan depends on; it ignores addresses within one kind of memory."""
    storages = [(storage.name, storage.num_bytes, type(storage.address).__name__) for storage in layout.storages]
    hasher = hashlib.blake2b(
        msgspec.msgpack.encode((layout.host, layout.device, layout.tensors, storages)), digest_size=16
    )
    for field in PieceColumns.__struct_fields__:
        hasher.update(np.ascontiguousarray(getattr(layout.pieces, field)).data)
    return hasher.hexdigest()


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    """A layout on the wire. Parts that many ranks share are encoded separately, so that they are decoded once."""

    host: str
    device: str
    tensors: bytes
    storages: tuple[Storage, ...]
    pieces: bytes


def encode(layout: Layout) -> bytes:
    """Return the layout as msgpack."""
    parts = msgspec.msgpack.encode(layout.tensors), layout.storages, columns.encode(layout.pieces)
    return msgspec.msgpack.encode(_Encoded(layout.host, layout.device, *parts))


def decode(encoded: bytes) -> Layout:
    """Decode the output of `encode`. Raises `RefitError` for anything else."""
    parts, tensors = _decode_parts(encoded)
    return Layout(parts.host, parts.device, tensors, parts.storages, _decode_pieces(parts.pieces))


def num_tensors(encoded: bytes) -> int:
    """Return the number of tensors in an encoded layout without decoding all of it. Raises `RefitError`."""
    return len(_decode_parts(encoded)[1])


def _decode_parts(encoded: bytes) -> tuple[_Encoded, tuple[Tensor, ...]]:
    try:
        parts = msgspec.msgpack.decode(encoded, type=_Encoded)
        return parts, _decode_tensors(parts.tensors)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefitError(f"not a layout: {error}") from error


@functools.lru_cache(maxsize=64)
def _decode_tensors(encoded: bytes) -> tuple[Tensor, ...]:
    return msgspec.msgpack.decode(encoded, type=tuple[Tensor, ...])


@functools.lru_cache(maxsize=64)
def _decode_pieces(encoded: bytes) -> PieceColumns:
    return columns.decode(encoded, PieceColumns, "a layout")
