"""A process on its way into a transfer group: announced at once, connected when all others are."""

from __future__ import annotations

import time
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from tandem.common.messages import ConnectTransferGroup
from tandem.common.worker_shards import process_of
from tandem.launch.service import ServiceContext
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import process_group
from tandem.refit.transports.meeting import Meeting


class Joining(NamedTuple):
    """A transfer group that waits for some of its processes."""

    command: ConnectTransferGroup
    transfer_group: TransferGroup
    meeting: Meeting
    store: Store
    deadline: float


def begin(command: ConnectTransferGroup, context: ServiceContext) -> Joining:
    """Announce the parts of this process to the others, and wait for none of them. Raises `RefitError`."""
    transfer_group = TransferGroup(command.transfer_group, command.members, command.device_type)
    is_over_tcp = context.config.refit.stream == "tcp"
    meeting = Meeting(
        command.rendezvous_host,
        command.rendezvous_port,
        prefix=f"refit/{command.transfer_group}/{command.epoch}",
        keys=process_group.GroupKeys(context.keys, command.public_keys) if is_over_tcp else None,
    )
    store = meeting.store(command.deadline_s)
    for part in command.members:
        if process_of(part) == context.name:
            process_group.announce(transfer_group, part, store)
    return Joining(command, transfer_group, meeting, store, time.monotonic() + command.deadline_s)
