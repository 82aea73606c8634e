"""Zero-copy: an engine's parameter points at the trainer's shared memory.

This needs a whole parameter of the engine in one range of shared memory, in the same element type and order.

One round's zero-copy transfers are held by their receiver.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.columns import Ints
from tandem.refit.layout import ITEM_SIZE_OF_CODE, ITEM_SIZES, Address
from tandem.refit.transfer import CopyColumns, LinkTransfer
from tandem.refit.transports.shm import ShmTransport
from tandem.refit.transports.transport import BoundTransfers, Route, TransferEnd, Transport, Wire

if TYPE_CHECKING:
    import torch

    from tandem.refit.transports.memory import NamedStorages


class AliasTransfers:
    """The zero-copy transfers of one round at their receiver."""

    def __init__(
        self, links: Sequence[str], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], end: TransferEnd
    ) -> None:
        """Hold each parameter with the range that it is to point at."""
        self.num_copies = self.num_bytes = 0
        self._links, self._pairs, self._end = links, pairs, end

    def install(self) -> None:
        """Point the parameters at the sources' memory; from now on each optimizer step is visible immediately."""
        for parameter, range_ in self._pairs:
            parameter.data = range_

    def run(self, deadline: float, only: Collection[str] | None, counted: dict[str, int]) -> None:
        """Count the links; there is nothing to move."""
        if only is None or process_of(self._end.member) in only:
            for link in self._links:
                counted.setdefault(link, 0)


class AliasTransport(Transport):
    """The destination reads the source's shared memory in place."""

    name = "alias"
    is_sent = False
    in_place_of = ShmTransport.name
    _copied = ShmTransport()

    def reaches(self, memory: type[Address], route: Route) -> bool:
        """Return whether both processes can map the same shared memory."""
        return self._copied.reaches(memory, route)

    def wire(self, route: Route) -> Wire | None:
        """Return None: nothing moves."""
        return None

    def explain(self, route: Route) -> str:
        """Return the reason as a phrase."""
        return "same host and the same place in one range of shared memory: read in place"

    def reads_in_place(self, copies: CopyColumns, num_bytes_D: Ints) -> NDArray[np.bool_]:
        """Return which copies fill a whole storage with one range of the same element type."""
        item_C = ITEM_SIZE_OF_CODE[copies.destination_dtype_C]
        is_range_C = (copies.shape_CD[:, :-1] == 1).all(axis=1)
        is_range_C &= (copies.source_strides_CD[:, -1] == item_C) & (copies.destination_strides_CD[:, -1] == item_C)
        is_alias_C: NDArray[np.bool_] = (
            is_range_C
            & (copies.source_dtype_C == copies.destination_dtype_C)
            & (copies.shape_CD[:, -1] * item_C == num_bytes_D[copies.destination_C])
        )
        return is_alias_C

    def bind(self, transfers: Sequence[LinkTransfer], end: TransferEnd) -> BoundTransfers:
        """Find each parameter's place in the sources' memory."""
        pairs = []
        for transfer in transfers:
            opened = [self._copied.open(storage, transfer.source, end) for storage in transfer.source_storages]
            pairs += places_of(transfer, opened, end.memory, end.member)
        return AliasTransfers([transfer.link for transfer in transfers], pairs, end)


def places_of(
    transfer: LinkTransfer, opened: Sequence[torch.Tensor], memory: NamedStorages, member: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters to re-point, each with its replacement in the source's memory.

    Args:
        transfer: its copies cover each of its destinations completely.
        opened: bytes of each source storage.
        memory: of this process.
        member: this process, for errors.

    Raises:
        RefitError: a parameter differs from the plan; nothing has been re-pointed.

    """
    at = transfer.copies
    pairs = []
    for index, name in enumerate(transfer.destination_storages):
        rows = np.flatnonzero(at.destination_C == index)
        if not len(rows):
            continue
        tensor, dtype = transfer.tensors[at.tensor_C[rows[0]]], transfer.dtypes(int(rows[0]))[1]
        parameter = memory.tensor(name, dtype, tensor)
        num_bytes = int(at.shape_CD[rows].prod(axis=1, dtype=np.int64).sum()) * ITEM_SIZES[dtype]
        if parameter.nbytes != num_bytes:
            raise RefitError(f"{member} has {name!r} of {parameter.nbytes} bytes for {num_bytes} bytes of {tensor}")
        shift_C = at.source_offset_C[rows] - at.destination_offset_C[rows]
        is_one_range = (shift_C == shift_C[0]).all() and (at.source_C[rows] == at.source_C[rows[0]]).all()
        has_equal_strides = (at.source_strides_CD[rows] == at.destination_strides_CD[rows])[at.shape_CD[rows] > 1].all()
        assert is_one_range, f"{name} is spread over {transfer.source}"
        assert has_equal_strides, f"{name} lies in another order at {transfer.source}"
        first = int(shift_C[0])
        range_ = opened[int(at.source_C[rows[0]])][first : first + num_bytes].view(parameter.dtype)
        pairs.append((parameter, range_.as_strided(parameter.shape, parameter.stride())))
    return pairs
