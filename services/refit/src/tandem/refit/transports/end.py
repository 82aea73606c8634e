"""One process's end of its transfers, to which a transport binds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tandem.refit.layout import Storage
from tandem.refit.transfer import TransferGroup

if TYPE_CHECKING:  # the planner runs in processes without torch
    import torch

    from tandem.refit.transports.memory import NamedStorages
    from tandem.refit.transports.process_group import ConnectedGroup


class TransferEnd(NamedTuple):
    """One process's end of its transfers, to which a transport binds them."""

    member: str
    memory: NamedStorages
    device: torch.device
    """Device of the parameters."""
    transfer_groups: Mapping[str, TransferGroup]
    """The program's transfer groups, by name."""
    groups: Mapping[str, ConnectedGroup]
    """Connected transfer groups by name, looked up at each run."""
    opened: dict[tuple[str, str], torch.Tensor]
    """Opened storages of other processes, by process and storage: each is opened once."""

    def open_once(self, source: str, storage: Storage, open_storage: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the bytes of another process's storage; `open_storage` opens it the first time."""
        key = source, storage.name
        if key not in self.opened:
            self.opened[key] = open_storage()
        return self.opened[key]
