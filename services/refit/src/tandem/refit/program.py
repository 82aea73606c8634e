"""Transfer programs: what one process copies at each refit, resolved to byte offsets.

A program is data. It is made once by `tandem.refit.planner`, travels as bytes, and is bound to live memory by the
transports; running it looks up no name and makes no decision. Copies are columns, as pieces are in a layout.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tandem.common.errors import RefitError
from tandem.refit import columns
from tandem.refit.columns import Ints, Table
from tandem.refit.layout import Layout
from tandem.refit.transfer import Mesh, Transfer
from tandem.refit.transports import registry


class Places(Table, frozen=True, eq=False):
    """Where the results of quantisation go: R rows of D dimensions, right-aligned."""

    region_R: Ints
    """Row of `Quantisation` whose result it is."""
    start_RD: Ints
    """First element inside the region: in elements for values, in blocks for scales."""
    shape_RD: Ints
    storage_R: Ints
    """Index into `Quantisation.storages`."""
    offset_R: Ints
    """Bytes."""
    strides_RD: Ints
    """Bytes."""


class Regions(Table, frozen=True, eq=False):
    """What has been transferred in the source's precision, to be quantised: Q rows of D dimensions, right-aligned."""

    tensor_Q: Ints
    """Index into `Quantisation.tensors`."""
    start_QD: Ints
    """In the global tensor; always the start of a block."""
    shape_QD: Ints
    """A region ends where a block ends, or where the tensor does. It lies row-major, without gaps."""
    offset_Q: Ints
    """Byte in the staging storage."""


class Quantisation(msgspec.Struct, frozen=True):
    """Regions that the receiver turns into scaled values of fewer bits when it installs a version.

    Each block of a region becomes one scale, its largest magnitude over the largest finite number of `dtype`, and
    values ``element / scale``. One `Quantisation` holds everything of one element type and one size of block.
    """

    dtype: str
    """Of the values, such as ``float8_e4m3fn``."""
    block: tuple[int, ...]
    """Elements of a block along each of the (last) dimensions."""
    scales_dtype: str
    staging: str
    """Name of the storage that the regions lie in; see `TransferProgram.staging`."""
    staging_dtype: str
    tensors: tuple[str, ...]
    storages: tuple[str, ...]
    """Of the destination."""
    regions: Regions
    values: Places
    scales: Places


class Products(Table, frozen=True, eq=False):
    """Boxes of weights that are merged with the product of two matrices: M rows; offsets and strides in bytes.

    ``live = base + scale * b @ a``. `base`, `a` and `b` lie row-major without gaps, of `a` and `b` some part is used.
    """

    tensor_M: Ints
    """Index into `Merging.tensors`."""
    dtype_M: Ints
    """Of live weights and of the base: index into `tandem.refit.layout.DTYPES`."""
    shape_MD: Ints
    """Rows and columns of the box."""
    live_M: Ints
    """Index into `Merging.storages`, as the next ones that are named without an offset."""
    live_offset_M: Ints
    live_strides_MD: Ints
    base_M: Ints
    rank_M: Ints
    """Columns of `b`, rows of `a`."""
    a_M: Ints
    a_offset_M: Ints
    a_stride_M: Ints
    """From one row to the next."""
    b_M: Ints
    b_offset_M: Ints


class Merging(msgspec.Struct, frozen=True):
    """Weights that an engine computes itself whenever it installs a version: a base that stays, and low-rank products.

    The base and both matrices are received in staging memory; nothing is received where the weights lie that the
    engine computes with.
    """

    tensors: tuple[str, ...]
    scales: tuple[float, ...]
    """Of the product, by tensor."""
    storages: tuple[str, ...]
    """Parameters and staging."""
    products: Products


class Staging(msgspec.Struct, frozen=True):
    """Memory that a receiver has beside its parameters, named as transfers, quantisations and merging name it."""

    name: str
    num_bytes: int
    dtype: str = "uint8"


_NO_ROWS = np.zeros(0, np.int64)


class Verification(msgspec.Struct, frozen=True, eq=False):
    """What one process digests, so that the weights it holds can be verified.

    Over all trainers every element of what engines want is digested exactly once; an engine digests all that it wants.
    Tensors that are quantised on the way, and the scales made of them, are left out on both sides.
    """

    rows: Ints
    """Of `Layout.pieces`, in the member's own layout, in ascending order."""
    dtypes: tuple[str, ...]
    """One for each of `Layout.tensors`: the element type that engines hold it in, to which a trainer converts before
    it digests. Empty where no engine wants the tensor."""
    frozen_rows: Ints = _NO_ROWS
    """Rows of tensors that never change, in ascending order; they are digested once, and `rows` has none of them."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Verification):
            return NotImplemented
        return (
            self.dtypes == other.dtypes
            and bool(np.array_equal(self.rows, other.rows))
            and bool(np.array_equal(self.frozen_rows, other.frozen_rows))
        )

    __hash__ = None  # type: ignore[assignment]


NOTHING = Verification(_NO_ROWS, ())
"""The verification of a process that has nothing to digest."""


class TransferProgram(msgspec.Struct, frozen=True):
    """Everything one process does so that the next version is held. In the order given, round after round."""

    member: str
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    """Streams only: the other transports have nothing to do at the source."""
    quantisations: tuple[Quantisation, ...] = ()
    staging: tuple[Staging, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    """Those that this process takes part in. All members connect them in order of their names."""
    verification: Verification = NOTHING
    merging: Merging | None = None
    received: Layout | None = None
    """What it receives, where, and what `verification` is of, if that is not its own layout: because of `merging`."""

    @property
    def num_bytes(self) -> int:
        """Bytes that one run receives, those of tensors that never change among them."""
        return sum(transfer.num_bytes for transfer in self.receives)


def encode(program: TransferProgram) -> bytes:
    """Return the program as msgpack."""
    return columns.encode(program)


class _Names(msgspec.Struct, frozen=True):
    """The part of a layout that says how many tensors it has."""

    tensors: tuple[msgspec.Raw, ...]


class _Received(msgspec.Struct, frozen=True):
    """The part of a program that says of what its digests are."""

    received: _Names | None = None


def num_received(encoded: bytes) -> int | None:
    """Return how many tensors digests are of, if they are not of the member's own layout; None for no program, too."""
    try:
        received = msgspec.msgpack.decode(encoded, type=_Received).received
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if received is None else len(received.tensors)


def decode(encoded: bytes) -> TransferProgram:
    """Read what `encode` wrote. Raises `RefitError` for anything else, and for a transport that does not exist."""
    program = columns.decode(encoded, TransferProgram, "a transfer program")
    try:
        for transfer in (*program.receives, *program.sends):
            registry.find(transfer.transport)
    except RefitError as error:
        raise RefitError(f"not a transfer program: {error}") from error
    return program
