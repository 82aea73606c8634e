"""Transfer programs: the copies of one process at each refit, resolved to byte offsets.

A program is data. `tandem.refit.planner` makes it once, it travels as bytes, and transports bind it to live memory.
Running it looks up no name and makes no decision. Copies are columns, like pieces in a layout.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tandem.common.errors import RefitError
from tandem.refit import columns
from tandem.refit.columns import ColumnTable, Ints
from tandem.refit.layout import Layout
from tandem.refit.transfer import LinkTransfer, TransferGroup
from tandem.refit.transports import registry


class QuantizedDestinations(ColumnTable, frozen=True, eq=False):
    """Destinations of quantised data: R rows of D dimensions, right-aligned."""

    region_R: Ints
    """Row in the regions of the `Quantisation`."""
    start_RD: Ints
    """First element inside the region, counted in elements for values and in blocks for scales."""
    shape_RD: Ints
    storage_R: Ints
    """Index into `Quantisation.storages`."""
    offset_R: Ints
    """Offset in bytes."""
    strides_RD: Ints
    """Strides in bytes."""


class QuantisedRegions(ColumnTable, frozen=True, eq=False):
    """Regions received in the source's precision, to be quantised: Q rows of D dimensions, right-aligned."""

    tensor_Q: Ints
    """Index into `Quantisation.tensors`."""
    start_QD: Ints
    """Start in the global tensor; always the start of a block."""
    shape_QD: Ints
    """Shape; a region ends where a block or the tensor ends. It is row-major without gaps."""
    offset_Q: Ints
    """Byte offset in the staging storage."""


class Quantisation(msgspec.Struct, frozen=True):
    """Regions that the receiver quantises into scaled values when it installs a version.

    Each block of a region becomes one scale, its largest magnitude divided by the largest finite number of `dtype`, and
    values ``element / scale``. One `Quantisation` holds all regions of one element type and one block shape.
    """

    dtype: str
    """Element type of the values, such as ``float8_e4m3fn``."""
    block: tuple[int, ...]
    """Shape of a block in the last dimensions."""
    scales_dtype: str
    staging: str
    """Name of the storage with the regions; see `TransferProgram.staging`."""
    staging_dtype: str
    tensors: tuple[str, ...]
    storages: tuple[str, ...]
    """Names of the destination's storages."""
    regions: QuantisedRegions
    values: QuantizedDestinations
    scales: QuantizedDestinations


class AdapterProducts(ColumnTable, frozen=True, eq=False):
    """Slices of weights that are merged with the product of two matrices: M rows; offsets and strides in bytes.

    ``live = base + scale * b @ a``. `base`, `a` and `b` are row-major without gaps; only parts of `a` and `b` may be
    used.
    """

    tensor_M: Ints
    """Index into `Merging.tensors`."""
    dtype_M: Ints
    """Element type of live weights and of the base: index into `tandem.refit.layout.DTYPES`."""
    shape_MD: Ints
    """Rows and columns of the slice."""
    live_M: Ints
    """Index into `Merging.storages`; likewise `base_M`, `a_M` and `b_M`."""
    live_offset_M: Ints
    live_strides_MD: Ints
    base_M: Ints
    rank_M: Ints
    """Number of columns of `b` and rows of `a`."""
    a_M: Ints
    a_offset_M: Ints
    a_stride_M: Ints
    """Bytes from one row of `a` to the next."""
    b_M: Ints
    b_offset_M: Ints


class Merging(msgspec.Struct, frozen=True):
    """Weights that an engine computes itself at each version: a fixed base plus low-rank products.

    Base and matrices are received in staging memory. Nothing is received directly into the weights.
    """

    tensors: tuple[str, ...]
    scales: tuple[float, ...]
    """Scale of the product, by tensor."""
    storages: tuple[str, ...]
    """Names of parameters and staging memory."""
    products: AdapterProducts


class Staging(msgspec.Struct, frozen=True):
    """A receiver's memory beside its parameters, used by transfers, quantisations and merges by name."""

    name: str
    num_bytes: int
    dtype: str = "uint8"


_NO_ROWS = np.zeros(0, np.int64)


class ProcessVerification(msgspec.Struct, frozen=True, eq=False):
    """The slices that one process digests, so that its weights can be verified.

    Over all trainers, every element that engines want is digested exactly once; an engine digests all that it wants.
    Tensors that are quantised in transit, and their scales, are left out on both sides.
    """

    rows: Ints
    """Rows in `Layout.pieces` of the process's own layout, ascending."""
    dtypes: tuple[str, ...]
    """The engines' element type for each of `Layout.tensors`, for trainers to convert to; empty if no engine wants the
    tensor."""
    frozen_rows: Ints = _NO_ROWS
    """Rows of frozen tensors, ascending; they are digested once and are not in `rows`."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessVerification):
            return NotImplemented
        return (
            self.dtypes == other.dtypes
            and bool(np.array_equal(self.rows, other.rows))
            and bool(np.array_equal(self.frozen_rows, other.frozen_rows))
        )

    __hash__ = None  # type: ignore[assignment]


NOTHING = ProcessVerification(_NO_ROWS, ())
"""The verification of a process without anything to digest."""


class TransferProgram(msgspec.Struct, frozen=True):
    """All steps by which one process gets the next version, in order, round after round."""

    member: str
    receives: tuple[LinkTransfer, ...]
    sends: tuple[LinkTransfer, ...]
    """Outgoing streams; other transports need no work at the source."""
    quantisations: tuple[Quantisation, ...] = ()
    staging: tuple[Staging, ...] = ()
    transfer_groups: tuple[TransferGroup, ...] = ()
    """Transfer groups that include this process. All processes connect their groups in order of name."""
    verification: ProcessVerification = NOTHING
    merging: Merging | None = None
    received: Layout | None = None
    """Layout of what it receives and digests, if that differs from its own layout because of `merging`."""
    largest_difference: float = 0.0
    """Largest share of changed elements of which streams from trainers send only these, to engines that hold the
    version before; 0 if they send everything."""

    @property
    def num_bytes(self) -> int:
        """Bytes that one run receives, including frozen tensors."""
        return sum(transfer.num_bytes for transfer in self.receives)


def encode(program: TransferProgram) -> bytes:
    """Return the program as msgpack."""
    return columns.encode(program)


class _Names(msgspec.Struct, frozen=True):
    """The part of a layout that gives its number of tensors."""

    tensors: tuple[msgspec.Raw, ...]


class _Received(msgspec.Struct, frozen=True):
    """The part of a program that tells which layout its digests are of."""

    received: _Names | None = None


def num_received(encoded: bytes) -> int | None:
    """Return the number of digested tensors if it is not that of the process's own layout; None otherwise."""
    try:
        received = msgspec.msgpack.decode(encoded, type=_Received).received
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if received is None else len(received.tensors)


def decode(encoded: bytes) -> TransferProgram:
    """Decode the output of `encode`. Raises `RefitError` for anything else, and for an unknown transport."""
    program = columns.decode(encoded, TransferProgram, "a transfer program")
    try:
        for transfer in (*program.receives, *program.sends):
            registry.find(transfer.transport)
    except RefitError as error:
        raise RefitError(f"not a transfer program: {error}") from error
    return program
