"""Transfers: what moves from one process to another in one round, resolved to byte offsets."""

from __future__ import annotations

import msgspec

from tandem.common.messages import DeviceType
from tandem.refit.columns import Ints, Table
from tandem.refit.layout import DTYPES, Storage


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
    transport: str
    """Name of the transport, in `tandem.refit.transports.registry`."""
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
    is_frozen: bool = False
    """Whether it is of tensors that never change: it runs for a receiver that has none of them yet."""

    @property
    def link(self) -> str:
        """What its bytes are counted under."""
        return link_name(self.source, self.destination)

    def dtypes(self, row: int) -> tuple[str, str]:
        """Return the element types of a copy: of the source and of the destination."""
        at = self.copies
        return DTYPES[at.source_dtype_C[row]], DTYPES[at.destination_dtype_C[row]]


class Mesh(msgspec.Struct, frozen=True):
    """Processes that stream to each other: some receivers and all that send to them."""

    name: str
    members: tuple[str, ...]
    """The rank of a process is its position."""
    device_type: DeviceType = "cpu"
    """Where messages lie: on GPUs if the memory of every member does, which NCCL connects; else gloo does."""
