"""Receivers that open a source's memory and copy out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.layout import Storage
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports.copying import BoundCopier
from tandem.refit.transports.end import TransferEnd
from tandem.refit.transports.memory import NamedStorages, destination_side, source_side, wire_bytes


class PulledTransfers:
    """The transfers of one round that their receiver copies, all at once."""

    def __init__(
        self,
        transfers: Sequence[LinkTransfer],
        end: TransferEnd,
        open_storage: Callable[[Storage, str, TransferEnd], torch.Tensor],
    ) -> None:
        """Find both ends of every copy; `open_storage` returns the bytes of a storage. Raises `RefitError`.

        A storage is opened once, however many transfers use it.
        """
        self._end = end
        self._peer = transfers[0].source
        self._num_bytes = [(transfer.link, int(wire_bytes(transfer.copies).sum())) for transfer in transfers]
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for transfer in transfers:
            at, names = transfer.copies, [storage.name for storage in transfer.source_storages]
            opened = {storage.name: open_storage(storage, transfer.source, end) for storage in transfer.source_storages}
            source_memory = NamedStorages(f"{end.member}: {transfer.source}", opened)
            destination = destination_side(at, transfer.destination_storages)
            destinations += end.memory.views(destination, transfer.tensors, at.tensor_C)
            sources += source_memory.views(source_side(at, names), transfer.tensors, at.tensor_C)
        self._copier = BoundCopier(destinations, sources)
        self.num_copies = len(destinations)
        self.num_bytes = sum(num_bytes for _, num_bytes in self._num_bytes)

    def install(self) -> None:
        """Change nothing before the first copy."""

    def run(self, deadline: float, only: Collection[str] | None, counted: dict[str, int]) -> None:
        """Copy, if this process is to receive."""
        if only is not None and process_of(self._end.member) not in only:
            return
        if time.monotonic() > deadline:
            raise RefitError(f"{self._end.member} failed while copying from {self._peer}: the deadline passed")
        self._copier.run()
        for link, num_bytes in self._num_bytes:
            counted[link] = counted.get(link, 0) + num_bytes
