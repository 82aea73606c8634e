"""Transfer programs: what one process copies at each refit, resolved to byte offsets.

A program is data. It is made once by `tandem.refit.planner`, travels as bytes, and is bound to live memory by the
transports; running it looks up no name and makes no decision. Copies are columns, as pieces are in a layout.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from tandem.refit import columns
from tandem.refit.columns import Ints, Table
from tandem.refit.layout import DTYPES, Storage

TransportName = Literal["alias", "shm", "cuda_ipc", "stream"]
"""How bytes reach a destination.

``alias``: the destination reads the source's memory in place, nothing is copied. ``shm``: it copies out of the source's
shared memory. ``cuda_ipc``: the same out of GPU memory. ``stream``: the source sends.
"""


class Copies(Table, frozen=True, eq=False):
    """Strided regions that go from storages of a source to storages of a destination: C rows of D dimensions.

    Dimensions run from the outermost to the innermost of the destination, missing ones stand in front with shape 1 and
    stride 0. Where element types differ, elements are converted.
    """

    tensor_C: Ints
    """Index into `Transfer.tensors`: the (first) tensor it moves, for error messages."""
    source_C: Ints
    """Index into `Transfer.source_storages`."""
    destination_C: Ints
    """Index into `Transfer.destination_storages`."""
    source_offset_C: Ints
    """Byte of the first element in the source storage."""
    destination_offset_C: Ints
    shape_CD: Ints
    source_strides_CD: Ints
    """Bytes."""
    destination_strides_CD: Ints
    source_dtype_C: Ints
    """Index into `tandem.refit.layout.DTYPES`."""
    destination_dtype_C: Ints


def link_name(source: str, destination: str) -> str:
    """Return what the bytes from one process to another are counted under."""
    return f"{source}>{destination}"


class Transfer(msgspec.Struct, frozen=True):
    """All that moves over one link in one round. Both ends of a stream walk the same copies in the same order."""

    source: str
    """The process that it comes from, such as ``trainer-0``; an engine in round 1."""
    destination: str
    transport: TransportName
    round: int
    """0 for what comes from trainers, 1 for what engines of one host pass on to each other after that."""
    num_bytes: int
    """Bytes on the link: each element in the smaller of its two types. An alias moves none."""
    copies: Copies
    source_storages: tuple[Storage, ...]
    destination_storages: tuple[str, ...]
    tensors: tuple[str, ...]
    mesh: str = ""
    """Name of the `Mesh` that a stream goes over; empty for the other transports."""

    @property
    def link(self) -> str:
        """What its bytes are counted under."""
        return link_name(self.source, self.destination)

    def dtypes(self, row: int) -> tuple[str, str]:
        """Return the element types of a copy: of the source and of the destination."""
        at = self.copies
        return DTYPES[at.source_dtype_C[row]], DTYPES[at.destination_dtype_C[row]]


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


class Staging(msgspec.Struct, frozen=True):
    """Memory that a receiver has beside its parameters, named as transfers and quantisations name it."""

    name: str
    num_bytes: int


class Mesh(msgspec.Struct, frozen=True):
    """Processes that stream to each other: some receivers and all that send to them."""

    name: str
    members: tuple[str, ...]
    """The rank of a process is its position."""


class Attestation(msgspec.Struct, frozen=True, eq=False):
    """What one process digests to prove what it holds.

    Over all trainers every element of what engines want is digested exactly once; an engine digests all that it wants.
    Tensors that are quantised on the way, and the scales made of them, are left out on both sides.
    """

    rows: Ints
    """Of `Layout.pieces`, in the member's own layout, in ascending order."""
    dtypes: tuple[str, ...]
    """One for each of `Layout.tensors`: the element type that engines hold it in, to which a trainer converts before
    it digests. Empty where no engine wants the tensor."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attestation):
            return NotImplemented
        return self.dtypes == other.dtypes and bool(np.array_equal(self.rows, other.rows))

    __hash__ = None  # type: ignore[assignment]


NOTHING = Attestation(np.zeros(0, np.int64), ())
"""The attestation of a process that has nothing to prove."""


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
    attestation: Attestation = NOTHING

    @property
    def num_bytes(self) -> int:
        """Bytes that one run receives."""
        return sum(transfer.num_bytes for transfer in self.receives)


def encode(program: TransferProgram) -> bytes:
    """Return the program as msgpack."""
    return columns.encode(program)


def decode(encoded: bytes) -> TransferProgram:
    """Read what `encode` wrote. Raises `RefitError` for anything else."""
    return columns.decode(encoded, TransferProgram, "a transfer program")
