"""A process on its way into a transfer group: announced at once, connected when all others are."""

from __future__ import annotations

import time
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from tandem.common.messages import ConnectTransferGroup, TransferGroupConnected
from tandem.common.worker_shards import process_of
from tandem.launch.service import ServiceContext
from tandem.refit.holder import WeightHolder
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import process_group
from tandem.refit.transports.meeting import GroupStore

_POLL_S = 0.001


class PendingTransferGroup(NamedTuple):
    """A transfer group that waits for some of its processes."""

    command: ConnectTransferGroup
    transfer_group: TransferGroup
    meeting: GroupStore
    store: Store
    deadline: float


def begin(command: ConnectTransferGroup, context: ServiceContext) -> PendingTransferGroup:
    """Announce the parts of this process to the others, and wait for none of them. Raises `RefitError`."""
    transfer_group = TransferGroup(command.transfer_group, command.members, command.device_type)
    is_over_tcp = context.config.refit.stream == "tcp"
    meeting = GroupStore(
        command.rendezvous_host,
        command.rendezvous_port,
        prefix=f"refit/{command.transfer_group}/{command.epoch}",
        keys=process_group.GroupKeys(context.keys, command.public_keys) if is_over_tcp else None,
    )
    store = meeting.store(command.deadline_s)
    for part in command.members:
        if process_of(part) == context.name:
            process_group.announce(transfer_group, part, store)
    return PendingTransferGroup(command, transfer_group, meeting, store, time.monotonic() + command.deadline_s)


class JoiningGroups:
    """The transfer groups that a process has announced itself to, until they are connected."""

    def __init__(self, context: ServiceContext, holder: WeightHolder) -> None:
        self._context, self._holder = context, holder
        self.groups: dict[str, PendingTransferGroup] = {}
        """Groups that wait for some of their processes, by name."""

    def begin(self, command: ConnectTransferGroup) -> None:
        """Announce this process to a group, in place of an earlier attempt to join it. Raises `RefitError`."""
        self.groups[command.transfer_group] = begin(command, self._context)

    def go_on(self) -> None:
        """Connect the groups whose processes are all there."""
        for group in [*self.groups.values()]:
            self._go_on(group)

    def _go_on(self, group: PendingTransferGroup) -> None:
        command = group.command
        try:
            left_s = group.deadline - time.monotonic()
            if left_s > 0 and process_group.absent(group.transfer_group, group.store):
                time.sleep(_POLL_S)
                return
            del self.groups[command.transfer_group]
            with self._context.phase(f"connecting transfer group {command.transfer_group}"):
                self._holder.connect(group.transfer_group, group.meeting, max(left_s, _POLL_S))
            self._context.reply(
                command.command_id,
                TransferGroupConnected(command_id=command.command_id, transfer_group=command.transfer_group),
            )
        except Exception as error:
            self.groups.pop(command.transfer_group, None)
            self._context.fail(command.command_id, error)
