"""A transport of one's own, in one module: the source writes files that the receiver reads, both on one host."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from tandem.common.errors import RefitError
from tandem.refit.layout import Address
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports.memory import destination_side, source_side
from tandem.refit.transports.transport import BoundTransfers, Route, TransferEnd, Transport, Wire


class Spool(Transport):
    """Bytes go through a folder, which private memory can be written to."""

    name = "spool"
    is_sent = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reaches(self, memory: type[Address], route: Route) -> bool:
        return route.same_host

    def wire(self, route: Route) -> Wire | None:
        return "memory"

    def explain(self, route: Route) -> str:
        return "same host, which has a spool"

    def preference(self, route: Route) -> int:
        return 1

    def buffer_bytes(self, num_members: int, num_bytes: int) -> int:
        return num_bytes

    def bind(self, transfers: Sequence[LinkTransfer], end: TransferEnd) -> BoundTransfers:
        return Spooled(self.folder, transfers, end)


class Spooled:
    def __init__(self, folder: Path, transfers: Sequence[LinkTransfer], end: TransferEnd) -> None:
        self._folder, self._end = folder, end
        self._transfers = sorted(transfers, key=lambda transfer: transfer.source != end.member)  # sends first
        self._views = [self._views_of(transfer) for transfer in self._transfers]
        self.num_copies = sum(len(views) for views in self._views)
        self.num_bytes = sum(transfer.num_bytes for transfer in transfers)

    def _views_of(self, transfer: LinkTransfer) -> list[torch.Tensor]:
        at = transfer.copies
        if transfer.source == self._end.member:
            side = source_side(at, [storage.name for storage in transfer.source_storages])
        else:
            side = destination_side(at, transfer.destination_storages)
        return self._end.memory.views(side, transfer.tensors, at.tensor_C)

    def install(self) -> None:
        pass

    def run(self, deadline: float, only: Collection[str] | None, counted: dict[str, int]) -> None:
        for transfer, views in zip(self._transfers, self._views, strict=True):
            path = self._folder / f"{transfer.source} to {transfer.destination} in round {transfer.round}"
            if transfer.source == self._end.member:
                unfinished = path.with_suffix(".part")
                unfinished.write_bytes(b"".join(view.contiguous().numpy().tobytes() for view in views))
                unfinished.rename(path)
            else:
                while not path.exists():
                    if time.monotonic() > deadline:
                        raise RefitError(f"{self._end.member} waited for {path.name}: the deadline passed")
                    time.sleep(0.001)
                self._read(path, views)
            counted[transfer.link] = counted.get(transfer.link, 0) + transfer.num_bytes

    def _read(self, path: Path, views: Sequence[torch.Tensor]) -> None:
        bytes_ = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        sizes = [view.nbytes for view in views]
        for view, own in zip(views, torch.split(bytes_, sizes), strict=True):
            view.copy_(own.view(view.dtype).view(view.shape))
        path.unlink()
