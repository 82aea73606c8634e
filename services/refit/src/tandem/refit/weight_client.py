"""A process's weight client, the same for trainers and engines.

It consumes each `PlaneCommand` and replies. A refit runs when its command arrives. `work` computes digests in
short slices of time, so that they delay nothing, and connects transfer groups once all their processes are there. It
waits only for the peers of streams, within the command's deadline.

A process that joins a transfer group is announced at once, and connected when all others are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, assert_never

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tandem.common import messages
from tandem.common.errors import RefitError
from tandem.common.memory import MemoryMeter
from tandem.common.worker_shards import process_of
from tandem.launch.service import ServiceContext
from tandem.refit import program
from tandem.refit.digests import comparison
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.holder import RunningDigest, WeightHolder
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import process_group
from tandem.refit.transports.meeting import GroupStore


class PendingTransferGroup(NamedTuple):
    """A transfer group that waits for some of its processes."""

    command: messages.ConnectTransferGroup
    transfer_group: TransferGroup
    meeting: GroupStore
    store: Store
    deadline: float


def begin(command: messages.ConnectTransferGroup, context: ServiceContext) -> PendingTransferGroup:
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

    def begin(self, command: messages.ConnectTransferGroup) -> None:
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
                messages.TransferGroupConnected(command_id=command.command_id, transfer_group=command.transfer_group),
            )
        except Exception as error:
            self.groups.pop(command.transfer_group, None)
            self._context.fail(command.command_id, error)


Verify = Literal["off", "sampled", "full"]
_SAMPLED_ONE_IN = 16
"""Fraction of rows, one in so many, that ``refit.verify: sampled`` digests in each version."""
_SLICE_S = 0.002
_POLL_S = 0.001
_PATIENCE = 2.0
"""Delay of a digest, in multiples of its expected duration: a version's first token comes before its verification."""


@contextmanager
def _limit_threads() -> Iterator[None]:
    """Leave the other cores to generation or training."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class WeightClient:
    """The weight plane's command handler in one process."""

    def __init__(self, context: ServiceContext, holder: WeightHolder) -> None:
        self._context = context
        self._holder = holder
        self._verify: Verify = context.config.refit.verify
        self._joining = JoiningGroups(context, holder)
        self._command: messages.ReportDigests | None = None
        self._digest: RunningDigest | None = None
        self._quantises = False
        """Whether this process quantises what it receives."""
        self._digest_s = 0.0
        self._digest_from = 0.0
        """When to start the digest, on the monotonic clock."""

    def handle(self, command: messages.PlaneCommand) -> None:
        """Execute one command."""
        match command:
            case messages.InstallProgram():
                with self._context.phase("installing the transfer program"):
                    self._install(command)
            case messages.ConnectTransferGroup():
                with self._context.phase(f"connecting transfer group {command.transfer_group}"):
                    # A process that it waits for may be dead and need replacing, so this must not block anything else.
                    self._joining.begin(command)
            case messages.Refit():
                with self._context.phase(f"refitting to version {command.version}"):
                    self._refit(command)
            case messages.ReportDigests():
                with self._context.phase(f"verifying version {command.version}"):
                    self._command, self._digest_s = command, 0.0
                    self._digest = self._digest_task(command.version)
                    self._digest_from = time.monotonic() + _PATIENCE * self._digest.expected_s
            case unhandled:
                assert_never(unhandled)

    def work(self, seconds: float | None = None) -> bool:
        """Advance transfer groups and the requested digest; return whether work is left.

        `seconds` limits the time taken from other work. None: there is no other work, so it may wait.
        """
        if self._joining.groups:
            self._joining.go_on()
        command, digest = self._command, self._digest
        if command is None or digest is None:
            return bool(self._joining.groups)
        early_s = self._digest_from - time.monotonic()
        if early_s > 0:
            if seconds is None:
                time.sleep(min(early_s, _POLL_S))
            return True
        try:
            with self._context.phase(f"verifying version {command.version}"), _limit_threads():
                started = time.perf_counter()
                is_done = digest.advance(_SLICE_S if seconds is None else seconds)
                self._digest_s += time.perf_counter() - started
                if is_done:
                    self._report_digest(command, digest)
        except Exception as error:
            self.abandon_digest()
            self._context.fail(command.command_id, error)
        return self._digest is not None or bool(self._joining.groups)

    def digests(self, version: int) -> tuple[bytes, ...]:
        """Return the digests of a version, computed at once. Raises `RefitError`."""
        digest = self._digest_task(version)
        digest.advance(math.inf)
        return tuple(map(comparison.encode_digests, digest.results()))

    def finish_digest(self) -> None:
        """Finish the requested digest, because the weights' memory is about to be released."""
        self._digest_from = 0.0
        while self._digest is not None:
            self.work(math.inf)

    def abandon_digest(self) -> None:
        """Drop the digest in progress, because the weights are about to change."""
        self._command = self._digest = None

    def close(self) -> None:
        """Stop joining and digesting. The holder closes its transfer groups itself."""
        self.abandon_digest()
        self._joining.groups.clear()

    def _install(self, command: messages.InstallProgram) -> None:
        self.abandon_digest()
        programs = [program.decode(encoded) for encoded in command.programs]
        self._quantises = any(each.quantisations for each in programs)
        bound = self._holder.install(programs)
        reply = messages.ProgramInstalled(
            command_id=command.command_id, num_copies=bound.num_copies, num_bytes=bound.num_bytes
        )
        self._context.reply(command.command_id, reply)

    def _refit(self, command: messages.Refit) -> None:
        if not command.only or self._context.name in command.only:  # a process that only sends continues its digest
            self.abandon_digest()
        memory = MemoryMeter()
        memory.begin()
        if command.whole:
            self._holder.distrust(command.whole)
        started = time.perf_counter()
        num_bytes = self._holder.apply(command.version, command.deadline_s, command.only, command.joining_engines)
        reply = messages.Refitted(
            command_id=command.command_id,
            version=command.version,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - started,
            memory=memory.use(),
        )
        self._context.reply(command.command_id, reply)

    def _digest_task(self, version: int) -> RunningDigest:
        return self._holder.digest_task(
            ElementSampling(version, _SAMPLED_ONE_IN) if self._verify == "sampled" else None
        )

    def _report_digest(self, command: messages.ReportDigests, digest: RunningDigest) -> None:
        wrong = self._holder.misquantised() if self._quantises else ()
        if wrong:
            raise RefitError(f"{', '.join(wrong)}: the weights held are not the quantisation of those received")
        reply = messages.DigestsReported(
            command_id=command.command_id,
            version=command.version,
            digests=tuple(map(comparison.encode_digests, digest.results())),
            seconds=self._digest_s,
        )
        self.abandon_digest()
        self._context.reply(command.command_id, reply)
