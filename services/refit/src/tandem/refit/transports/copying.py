"""Copies between many tensors of this process at once, and receivers that open a source's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.layout import Storage
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports import gpu_copy, memory, transport


class BoundCopier:
    """Copier of each source to its destination, with conversion of element types."""

    def __init__(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Take views of equal shapes, pair by pair; no two destinations may share memory."""
        self._destinations = list(destinations)
        self._sources = list(sources)
        tensors = (*self._destinations, *self._sources)
        on_one_gpu = bool(tensors) and all(tensor.is_cuda and tensor.device == tensors[0].device for tensor in tensors)
        # One kernel launch per slice would leave a GPU idle most of the time.
        self._kernels = gpu_copy.prepare(self._destinations, self._sources) if on_one_gpu else None

    def backwards(self) -> BoundCopier:
        """Return the copier of each destination to its source."""
        return BoundCopier(self._sources, self._destinations)

    def places(self) -> tuple[object, ...]:
        """Return where the sources lie and how they are arranged; equal for copiers that read the same."""
        return tuple(
            (source.device, source.data_ptr(), source.dtype, source.shape, source.stride(), destination.dtype)
            for destination, source in zip(self._destinations, self._sources, strict=True)
        )

    @torch.no_grad()
    def run(self) -> None:
        """Copy all pairs; on a GPU, only queue the copies on the current stream."""
        if self._kernels is not None:
            self._kernels.launch()
        elif self._destinations:
            torch._foreach_copy_(self._destinations, self._sources)


class PulledTransfers:
    """The transfers of one round that their receiver copies, all at once."""

    def __init__(
        self,
        transfers: Sequence[LinkTransfer],
        end: transport.TransferEnd,
        open_storage: Callable[[Storage, str, transport.TransferEnd], torch.Tensor],
    ) -> None:
        """Find both ends of every copy; `open_storage` returns the bytes of a storage. Raises `RefitError`.

        A storage is opened once, however many transfers use it.
        """
        self._end = end
        self._peer = transfers[0].source
        self._num_bytes = [(transfer.link, int(memory.wire_bytes(transfer.copies).sum())) for transfer in transfers]
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for transfer in transfers:
            at, names = transfer.copies, [storage.name for storage in transfer.source_storages]
            opened = {storage.name: open_storage(storage, transfer.source, end) for storage in transfer.source_storages}
            source_memory = memory.NamedStorages(f"{end.member}: {transfer.source}", opened)
            destination = memory.destination_side(at, transfer.destination_storages)
            destinations += end.memory.views(destination, transfer.tensors, at.tensor_C)
            sources += source_memory.views(memory.source_side(at, names), transfer.tensors, at.tensor_C)
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
