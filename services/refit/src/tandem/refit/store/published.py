"""A trainer's share of a version in a store, in chunks; all shares have each element once.

A trainer publishes the slices that it digests (`ProcessVerification`): over all trainers these are every element that
engines want, once. They lie one after another in a storage, those that never change in one of their own, in the
engines' element type unless the trainer's is smaller. Each storage is cut into chunks, which are compared, written and
read by themselves. Trainer and refit service derive all of it from the trainer's layout and verification, and get the
same.

A plan with a store has engines that trainers would stream to read the store instead.

No torch here: the refit service plans with the layouts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tandem.common.worker_shards import process_of
from tandem.refit import columns, layout, planner
from tandem.refit.columns import Ints
from tandem.refit.layout import ITEM_SIZES, Layout, PieceColumns, Storage, StoreMemory
from tandem.refit.planner import TransferPlan
from tandem.refit.program import ProcessVerification, TransferProgram
from tandem.refit.transports import registry

CHUNK_BYTES = 16 << 20
"""Largest chunk, unless one index of a tensor's last dimension but one is larger."""
ALIGNMENT = 8
"""Bytes; slices and chunks begin at a multiple of it."""
CHANGING, FROZEN = "published", "published and frozen"
"""Names of the storages, in their order; the second is left out where nothing is frozen."""
_HOST = "refit.store"


class ChunkRange(msgspec.Struct, frozen=True, array_like=True):
    """A chunk: its place in a published storage, and how it is compared."""

    storage: int
    """Index into the storages of the published layout."""
    begin: int
    """Byte offset in the storage."""
    num_bytes: int
    item_size: int
    """Bytes of the integers that are compared."""


class PublishedShare(msgspec.Struct, frozen=True, eq=False):
    """The share of one trainer, as K slices in chunks."""

    layout: Layout
    """Published slices, one a piece. Their addresses are those of a store."""
    row_K: Ints
    """Row of each slice in the trainer's own `Layout.pieces`."""
    start_KD: Ints
    """First index of the slice within that piece."""
    chunks: tuple[ChunkRange, ...]
    first_C: tuple[int, ...]
    """Chunk c has the slices ``first_C[c] : first_C[c + 1]``."""

    @property
    def writer(self) -> str:
        """Folder of the trainer's versions."""
        address = self.layout.storages[0].address
        assert isinstance(address, StoreMemory), "all of them are"
        return address.writer


def number_of(storage: str) -> int:
    """Return the index of a published storage of this name."""
    return (CHANGING, FROZEN).index(storage)


def name_writer(member: str, trainer_layout: Layout, verification: ProcessVerification) -> str:
    """Return a folder for the versions of one trainer process, which no other process has, nor any other share."""
    hasher = hashlib.blake2b(layout.encode(trainer_layout), digest_size=12)
    hasher.update(columns.encode(verification))
    return f"{member}-{hasher.hexdigest()}"


def publish_layout(member: str, trainer_layout: Layout, verification: ProcessVerification) -> PublishedShare:
    """Return what a trainer publishes of its own layout."""
    dtypes = [
        _smaller(tensor.dtype, dtype) for tensor, dtype in zip(trainer_layout.tensors, verification.dtypes, strict=True)
    ]
    address = StoreMemory(name_writer(member, trainer_layout, verification))
    slices = _Slices(trainer_layout, dtypes)
    storages: list[Storage] = []
    for name, rows in ((CHANGING, verification.rows), (FROZEN, verification.frozen_rows)):
        if len(rows) or name == CHANGING:
            num_bytes = slices.add(len(storages), rows)
            storages.append(Storage(name, num_bytes, address))
    tensors = tuple(
        msgspec.structs.replace(tensor, dtype=dtype)
        for tensor, dtype in zip(trainer_layout.tensors, dtypes, strict=True)
    )
    pieces, row_K, start_KD = slices.columns()
    return PublishedShare(
        Layout(_HOST, "cpu", tensors, tuple(storages), pieces),
        row_K,
        start_KD,
        tuple(slices.chunks),
        (*slices.firsts, len(row_K)),
    )


def _smaller(source: str, engine: str) -> str:
    return engine if engine and ITEM_SIZES[engine] <= ITEM_SIZES[source] else source


class _Slices:
    """The slices of a publication as they are cut, and the chunks that they fill."""

    def __init__(self, trainer_layout: Layout, dtypes: Sequence[str]) -> None:
        self._layout = trainer_layout
        self._sizes = [ITEM_SIZES[dtype] for dtype in dtypes]
        self._num_dims = trainer_layout.pieces.shape_PD.shape[1]
        self._rows: list[int] = []
        self._starts: list[tuple[int, ...]] = []
        self._shapes: list[tuple[int, ...]] = []
        self._offsets: list[int] = []
        self._storages: list[int] = []
        self.chunks: list[ChunkRange] = []
        self.firsts: list[int] = []

    def add(self, storage: int, rows: Ints) -> int:
        """Add the slices of a storage; return its bytes."""
        pieces, begin, end, size = self._layout.pieces, 0, 0, 2
        self.firsts.append(len(self._rows))
        for row in rows.tolist():
            item_size = self._sizes[int(pieces.tensor_P[row])]
            for start, shape in _cut(pieces.shape_PD[row].tolist(), item_size):
                num_bytes = -(-math.prod(shape) * item_size // ALIGNMENT) * ALIGNMENT
                if end > begin and end + num_bytes - begin > CHUNK_BYTES:
                    self.chunks.append(ChunkRange(storage, begin, end - begin, size))
                    self.firsts.append(len(self._rows))
                    begin, size = end, 2
                size = min(size, item_size)  # two bytes of a float32 are often as they were
                self._rows.append(row)
                self._starts.append(start)
                self._shapes.append(shape)
                self._offsets.append(end)
                self._storages.append(storage)
                end += num_bytes
        if end > begin:
            self.chunks.append(ChunkRange(storage, begin, end - begin, size))
        else:
            self.firsts.pop()
        return end

    def columns(self) -> tuple[PieceColumns, Ints, Ints]:
        """Return the pieces of the published layout, the row of each in the trainer's own, and its first index."""
        shape_KD, start_KD = (
            np.array(values, np.int64).reshape(len(self._rows), self._num_dims)
            for values in (self._shapes, self._starts)
        )
        row_K, pieces = np.array(self._rows, np.int64), self._layout.pieces.rows(np.array(self._rows, np.int64))
        size_K = np.array(self._sizes, np.int64)[pieces.tensor_P]
        after_KD = np.cumprod(np.append(shape_KD, np.ones((len(row_K), 1), np.int64), 1)[:, ::-1], axis=1)[:, ::-1]
        num_dims_K = np.array([len(tensor.shape) for tensor in self._layout.tensors], np.int64)[pieces.tensor_P]
        is_there_KD = np.arange(self._num_dims) >= self._num_dims - num_dims_K[:, None]
        strides_KD = np.where(is_there_KD, after_KD[:, 1:] * size_K[:, None], 0)
        published = PieceColumns(
            pieces.tensor_P,
            np.array(self._storages, np.int64),
            pieces.start_PD + start_KD,
            shape_KD,
            np.array(self._offsets, np.int64),
            strides_KD,
        )
        return published, row_K, start_KD


def _cut(shape: list[int], item_size: int, dim: int = 0) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield first index and shape of parts of a slice that fit into a chunk, in row-major order."""
    start = [0] * len(shape)
    inner = math.prod(shape[dim + 1 :]) * item_size if dim < len(shape) else 0
    if dim >= len(shape) or inner * shape[dim] <= CHUNK_BYTES:
        yield tuple(start), tuple(shape)
        return
    if inner > CHUNK_BYTES:
        for index in range(shape[dim]):
            for inner_start, inner_shape in _cut([*shape[:dim], 1, *shape[dim + 1 :]], item_size, dim + 1):
                yield (*inner_start[:dim], index, *inner_start[dim + 1 :]), inner_shape
        return
    step = max(CHUNK_BYTES // inner, 1)
    for first in range(0, shape[dim], step):
        start[dim] = first
        yield tuple(start), (*shape[:dim], min(step, shape[dim] - first), *shape[dim + 1 :])


def plan_with_store(
    sources: Mapping[str, Layout], destinations: Mapping[str, Layout], *, allow_alias: bool, alias_frozen: bool
) -> TransferPlan:
    """Plan how every wanted element reaches its engine; arguments and errors are those of `planner.plan`.

    All trainers publish the share that they digest. Engines within reach of their memory read that as they would
    without a store.
    """
    direct = planner.plan(sources, destinations, allow_alias=allow_alias, alias_frozen=alias_frozen)
    far_engines = {process_of(part) for part in destinations if _is_sent_to(direct.programs[part])}
    far = {part: layout for part, layout in destinations.items() if process_of(part) in far_engines}
    if not far:
        return direct
    shares = {
        member: publish_layout(member, layout, direct.programs[member].verification).layout
        for member, layout in sources.items()
    }
    stored = planner.plan(shares, far, allow_alias=False)
    near = {part: layout for part, layout in destinations.items() if part not in far}
    programs = {
        member: msgspec.structs.replace(each, sends=(), transfer_groups=()) for member, each in direct.programs.items()
    }
    if near:
        again = planner.plan(sources, near, allow_alias=allow_alias, alias_frozen=alias_frozen)
        for member in (*sources, *near):
            program = again.programs[member]
            programs[member] = msgspec.structs.replace(program, verification=programs[member].verification)
    for part in far:
        programs[part] = stored.programs[part]
    return TransferPlan(
        programs=programs,
        links=(*(again.links if near else ()), *stored.links),
        frozen_links=(*(again.frozen_links if near else ()), *stored.frozen_links),
        transfer_groups=again.transfer_groups if near else (),
        received={part: (stored if part in far else direct).received[part] for part in destinations},
    )


def _is_sent_to(program: TransferProgram) -> bool:
    return any(not each.round and registry.find(each.transport).is_sent for each in program.receives)
