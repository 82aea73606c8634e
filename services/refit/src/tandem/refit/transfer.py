"""Transfers: the bytes that move from one process to another in one round, resolved to byte offsets."""

from __future__ import annotations

import msgspec

from tandem.common.messages import DeviceType
from tandem.refit.columns import ColumnTable, Ints
from tandem.refit.layout import DTYPES, Storage


class CopyColumns(ColumnTable, frozen=True, eq=False):
    """Strided regions copied from storages of a source to storages of a destination: C rows of D dimensions.

    Dimensions run from the destination's outermost to its innermost; missing ones come first, with shape 1 and stride
    0. Elements are converted if the element types differ.
    """

    tensor_C: Ints
    """Index into `LinkTransfer.tensors` of the (first) tensor in the region, for error messages."""
    source_C: Ints
    """Index into `LinkTransfer.source_storages`."""
    destination_C: Ints
    """Index into `LinkTransfer.destination_storages`."""
    source_offset_C: Ints
    """Byte offset of the first element in the source storage."""
    destination_offset_C: Ints
    shape_CD: Ints
    source_strides_CD: Ints
    """Strides in bytes."""
    destination_strides_CD: Ints
    source_dtype_C: Ints
    """Index into `tandem.refit.layout.DTYPES`."""
    destination_dtype_C: Ints


def link_name(source: str, destination: str) -> str:
    """Return the name under which bytes from one process to another are counted."""
    return f"{source}>{destination}"


class LinkTransfer(msgspec.Struct, frozen=True):
    """All bytes that move over one link in one round. Both ends of a stream process the same copies in order."""

    source: str
    """The sending process, such as ``trainer-0``; an engine in round 1."""
    destination: str
    transport: str
    """Name of the transport, in `tandem.refit.transports.registry`."""
    round: int
    """0 for transfers from trainers, 1 for those between engines of one host that follow."""
    num_bytes: int
    """Bytes on the link: each element in the smaller of its two types. Zero-copy moves none."""
    copies: CopyColumns
    source_storages: tuple[Storage, ...]
    destination_storages: tuple[str, ...]
    tensors: tuple[str, ...]
    transfer_group: str = ""
    """Name of a stream's transfer group; empty for other transports."""
    is_frozen: bool = False
    """Whether it moves frozen tensors; then it runs only for receivers without them."""

    @property
    def link(self) -> str:
        """Name under which its bytes are counted."""
        return link_name(self.source, self.destination)

    def dtypes(self, row: int) -> tuple[str, str]:
        """Return the element types of a copy at the source and at the destination."""
        at = self.copies
        return DTYPES[at.source_dtype_C[row]], DTYPES[at.destination_dtype_C[row]]


class TransferGroup(msgspec.Struct, frozen=True):
    """A transfer group: some receivers, and all processes that stream to them."""

    name: str
    members: tuple[str, ...]
    """Processes in order of rank."""
    device_type: DeviceType = "cpu"
    """Place of the messages: GPUs (NCCL) if all processes have their memory there, else the CPU (gloo)."""
