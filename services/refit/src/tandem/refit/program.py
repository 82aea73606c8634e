"""Transfer programs: what one engine copies at each refit, resolved to byte offsets.

A program is data. It is made once by `tandem.refit.planner`, travels as bytes, and is bound to live memory by a
transport; running it looks up no name and makes no decision.
"""

from __future__ import annotations

import msgspec

from tandem.common.errors import RefitError
from tandem.refit.layout import ITEM_SIZES, Address


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A storage that the program reads."""

    member: str
    """The process that owns it, such as ``trainer-0``."""
    storage: str
    num_bytes: int
    address: Address


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Elements in one storage, laid out by byte strides; the shape is the copy's."""

    offset: int
    strides: tuple[int, ...]
    dtype: str


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """Elements that go from a source to one of the engine's storages, converted if the element types differ."""

    tensor: str
    """Hugging Face name of the (first) tensor it moves, for error messages."""
    source: int
    """Index into `TransferProgram.sources`."""
    source_region: Region
    destination: str
    """Name of the engine's storage."""
    destination_region: Region
    shape: tuple[int, ...]
    num_bytes: int
    """Bytes written."""

    @property
    def is_run(self) -> bool:
        """Whether it moves one range of bytes unchanged."""
        item_size = ITEM_SIZES[self.destination_region.dtype]
        strides = self.source_region.strides, self.destination_region.strides
        return strides == ((item_size,),) * 2 and self.source_region.dtype == self.destination_region.dtype


class Alias(msgspec.Struct, frozen=True, array_like=True):
    """An engine storage that is replaced by the trainer's memory, read in place: nothing is ever copied.

    The engine's parameter keeps its shape and strides; only its bytes lie elsewhere.
    """

    tensor: str
    """As in `Copy`."""
    destination: str
    source: int
    offset: int
    num_bytes: int
    dtype: str


class TransferProgram(msgspec.Struct, frozen=True):
    """Everything one engine does to hold the next version."""

    engine: str
    sources: tuple[Source, ...]
    copies: tuple[Copy, ...]
    aliases: tuple[Alias, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that one run writes."""
        return sum(copy.num_bytes for copy in self.copies)


def encode(program: TransferProgram) -> bytes:
    """Return the program as msgpack."""
    return msgspec.msgpack.encode(program)


def decode(encoded: bytes) -> TransferProgram:
    """Read what `encode` wrote. Raises `RefitError` for anything else."""
    try:
        return msgspec.msgpack.decode(encoded, type=TransferProgram)
    except msgspec.MsgspecError as error:
        raise RefitError(f"not a transfer program: {error}") from error
