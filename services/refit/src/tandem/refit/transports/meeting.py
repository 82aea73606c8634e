"""The place where the processes of a transfer group meet, and the kind of group that they connect."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import process_group
from tandem.refit.transports.process_group import ConnectedGroup, GroupKeys


class GroupStore(NamedTuple):
    """The store where processes of a transfer group meet, as plain data."""

    host: str
    port: int
    prefix: str
    """Prefix of keys, new for each attempt."""
    keys: GroupKeys | None = None
    """Keys of a group over TCP; None for one over gloo or NCCL."""

    def store(self, timeout_s: float) -> Store:
        """Return a new connection to the store."""
        timeout = timedelta(seconds=timeout_s)
        return PrefixStore(
            self.prefix, TCPStore(self.host, self.port, is_master=False, use_libuv=False, timeout=timeout)
        )

    def connect(
        self, transfer_group: TransferGroup, member: str, device: torch.device, timeout_s: float
    ) -> ConnectedGroup:
        """Join a transfer group, and return when every process has. Raises `RefitError`."""
        store = self.store(timeout_s)
        if self.keys is None:
            return process_group.connect(transfer_group, member, store, device, timeout_s)
        from tandem.refit.transports import tcp_group  # most runs need none of it

        return tcp_group.connect(transfer_group, member, store, self.keys, timeout_s)
