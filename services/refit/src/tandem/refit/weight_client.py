"""A process's weight client, the same for trainers and engines.

It consumes each `PlaneCommand` and replies. A refit runs when its command arrives. `work` computes digests in
short slices of time, so that they delay nothing, and connects transfer groups once all their processes are there. It
waits only for the peers of streams, within the command's deadline.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, assert_never

import msgspec
import torch

from tandem.common.errors import RefitError
from tandem.common.memory import MemoryMeter
from tandem.common.messages import (
    ConnectTransferGroup,
    DigestsReported,
    InstallProgram,
    PlaneCommand,
    ProgramInstalled,
    Refit,
    Refitted,
    ReportDigests,
    TransferGroupConnected,
)
from tandem.common.worker_shards import process_of
from tandem.launch.service import ServiceContext
from tandem.refit import joining, program
from tandem.refit.bound import BoundProgram, bind
from tandem.refit.digests import comparison
from tandem.refit.digests.slices import DigestList
from tandem.refit.digests.task import DigestTask, Sampling
from tandem.refit.digests.version import FrozenDigests, VersionDigest
from tandem.refit.joining import Joining
from tandem.refit.layout import Layout
from tandem.refit.program import TransferProgram, Verification
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import cuda_ipc, process_group, registry
from tandem.refit.transports.meeting import Meeting

Verify = Literal["off", "sampled", "full"]
_SAMPLED_ONE_IN = 16
"""Fraction of rows, one in so many, that ``refit.verify: sampled`` digests in each version."""
_SLICE_S = 0.002
_POLL_S = 0.001
_PATIENCE = 2.0
"""Delay of a digest, in multiples of its expected duration: a version's first token comes before its verification."""


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return the host name used in layouts; two machines never share it, even with equal configured names."""
    return f"{socket.gethostname()}/{_BOOT_ID.read_text()[:8]}"


def device_name(device: torch.device) -> str:
    """Return the device name used in layouts."""
    return "cpu" if device.type == "cpu" else cuda_ipc.device_uuid(device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Leave the other cores to generation or training."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Installed(Protocol):
    """Bound programs, as each refit runs them."""

    @property
    def num_copies(self) -> int:
        """Number of copies in one run."""
        ...

    @property
    def num_bytes(self) -> int:
        """Number of bytes that one run moves."""
        ...


class Digesting(Protocol):
    """A digest in progress; see `DigestTask`."""

    @property
    def expected_s(self) -> float:
        """Rough duration on an idle machine, in seconds."""
        ...

    def advance(self, seconds: float) -> bool:
        """Work for this long; return whether everything is done."""
        ...

    def results(self) -> tuple[comparison.Digests, ...]:
        """Return the digests of each worker."""
        ...


class Holder(Protocol):
    """Weights that take part in refits: a trainer's backend or an engine, with one or more workers."""

    def install(self, programs: Sequence[TransferProgram]) -> Installed:
        """Bind the program of each worker, replacing the previous one. Raises `RefitError`."""
        ...

    def connect(self, transfer_group: TransferGroup, meeting: Meeting, timeout_s: float) -> None:
        """Connect a transfer group for each worker in it, replacing an earlier connection. Raises `RefitError`."""
        ...

    def apply(
        self, version: int, deadline_s: float, only: Collection[str], joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Run the program: receive or send `version`; return the bytes on each link. Raises `RefitError`.

        `only` are the destinations to serve; empty for all. `joining_engines` are those among them that also get frozen
        tensors; None for all.
        """
        ...

    def digest_task(self, sampling: Sampling | None) -> Digesting:
        """Return a task that digests the weights, which must not change until it is done. Raises `RefitError`."""
        ...

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors that differ from the quantisation of the received weights."""
        ...


class Weights:
    """A `Holder` of plain memory with one worker: a layout, and the live tensors of its storages.

    Or of a copy, in memory that other processes read while the live tensors change. Digests are of the live tensors, so
    a copy that differs is noticed.
    """

    def __init__(
        self, layout: Layout, storages: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Hold the storages; `live` are the tensors that they copy, by the same names, if they are copies."""
        self.layout = layout
        self.storages = storages
        self._live = live
        self._program: TransferProgram | None = None
        self._bound: BoundProgram | None = None
        self._digest_list: DigestList | None = None
        """Slices to digest for the installed program, once requested."""
        self._frozen_digests: FrozenDigests | None = None
        """Digests of frozen tensors, once requested."""
        self._groups: dict[str, process_group.Group] = {}
        """Transfer groups by name; looked up whenever the program runs."""
        self._aliased: set[str] = set()
        """Storages that the installed program has re-pointed at the sender's memory."""

    @property
    def layouts(self) -> tuple[Layout]:
        """The layout, as that of the only worker."""
        return (self.layout,)

    def refresh(self) -> None:
        """Copy the live tensors, and return when the copy is complete."""
        assert self._live is not None, "only a copy can be refreshed"
        for name, storage in self.storages.items():
            if storage is not self._live[name]:
                storage.copy_(self._live[name], non_blocking=True)
        if any(storage.device.type == "cuda" for storage in self.storages.values()):
            torch.cuda.synchronize()  # other processes read it without waiting for a stream of this one

    def install(self, programs: Sequence[TransferProgram]) -> BoundProgram:
        """Bind a program, replacing the previous one."""
        (program,) = programs
        self._unbind()
        in_place = [t for t in program.receives if registry.find(t.transport).in_place_of]
        aliased = {name for transfer in in_place for name in transfer.destination_storages}
        for name in (self._aliased - aliased) & self.storages.keys():
            # It still points at the sender's memory, which is read-only: a copy into it would fault.
            self.storages[name].data = torch.empty_like(self.storages[name])
        self._aliased = aliased
        self._bound = bind(program, self.storages, self._groups)
        self._program = program
        return self._bound

    def connect(self, transfer_group: TransferGroup, meeting: Meeting, timeout_s: float) -> None:
        """Connect a transfer group if the program uses it."""
        if self._program is None:
            raise RefitError("no transfer program is installed")
        if self._program.member not in transfer_group.members:
            return
        if former := self._groups.pop(transfer_group.name, None):
            former.close()
        device = next((tensor.device for tensor in self.storages.values()), torch.device("cpu"))
        self._groups[transfer_group.name] = meeting.connect(transfer_group, self._program.member, device, timeout_s)

    def apply(
        self, version: int, deadline_s: float, only: Collection[str], joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Run the program."""
        if self._program is None or self._bound is None:
            raise RefitError("no transfer program is installed")
        if self._program.receives and (joining_engines is None or process_of(self._program.member) in joining_engines):
            self._frozen_digests = None
        return self._bound.run(deadline_s, only or None, joining_engines)

    def distrust(self, engines: Collection[str]) -> None:
        """Send these engines whole weights next time."""
        if self._bound is not None:
            self._bound.distrust(engines)

    def digest_task(
        self, sampling: Sampling | None, copies: Mapping[str, torch.Tensor] | None = None
    ) -> DigestTask | VersionDigest:
        """Return a task for the slices that the program assigns to this process.

        `copies` are read in the place of staging memory of these names.
        """
        if self._program is None or self._bound is None:
            raise RefitError("no transfer program is installed")
        verification, merger = self._program.verification, self._bound.merger
        task = self._task(verification, sampling, self._digest_list, copies)
        self._digest_list = task.digest_list
        if not len(verification.frozen_rows) and merger is None:
            return task
        if self._frozen_digests is None:
            # In full, because other processes may sample another version.
            once = msgspec.structs.replace(verification, rows=verification.frozen_rows)
            self._frozen_digests = FrozenDigests(self._task(once, None, None))
        merges: Iterator[None] = iter(())
        if merger is not None:
            merges = merger.check() if sampling is None else merger.check(sampling.version, sampling.one_in)
        merges_s = task.seconds_for(merger.num_bytes) if merger else 0.0
        return VersionDigest(task, self._frozen_digests, merges, merges_s)

    def _task(
        self,
        verification: Verification,
        sampling: Sampling | None,
        known: DigestList | None,
        copies: Mapping[str, torch.Tensor] | None = None,
    ) -> DigestTask:
        """Return a task for some rows of the weights that are held or received."""
        assert self._program is not None, "a program is installed"
        assert self._bound is not None, "a program is installed"
        return DigestTask(
            self._program.received or self.layout,
            {**(self._live or self.storages), **self._bound.staging, **(copies or {})},
            verification,
            sampling=sampling,
            quantisations=self._program.quantisations,
            digest_list=known,
        )

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors that differ from the quantisation of the received weights."""
        return () if self._bound is None else self._bound.misquantised()

    def close(self) -> None:
        """Release the program, and close all transfer groups."""
        self._unbind()
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.close()
        self._bound = self._program = self._digest_list = self._frozen_digests = None


class WeightClient:
    """The weight plane's command handler in one process."""

    def __init__(self, context: ServiceContext, holder: Holder) -> None:
        self._context = context
        self._holder = holder
        self._verify: Verify = context.config.refit.verify
        self._joining: dict[str, Joining] = {}
        self._command: ReportDigests | None = None
        self._digest: Digesting | None = None
        self._quantises = False
        """Whether this process quantises what it receives."""
        self._digest_s = 0.0
        self._digest_from = 0.0
        """When to start the digest, on the monotonic clock."""

    def handle(self, command: PlaneCommand) -> None:
        """Execute one command."""
        match command:
            case InstallProgram():
                with self._context.phase("installing the transfer program"):
                    self._install(command)
            case ConnectTransferGroup():
                with self._context.phase(f"connecting transfer group {command.transfer_group}"):
                    self._connect(command)
            case Refit():
                with self._context.phase(f"refitting to version {command.version}"):
                    self._refit(command)
            case ReportDigests():
                with self._context.phase(f"verifying version {command.version}"):
                    self._begin_digest(command)
            case other:
                assert_never(other)

    def work(self, seconds: float | None = None) -> bool:
        """Advance transfer groups and the requested digest; return whether work is left.

        `seconds` limits the time taken from other work. None: there is no other work, so it may wait.
        """
        for group in [*self._joining.values()]:
            self._go_on_joining(group)
        command, digest = self._command, self._digest
        if command is None or digest is None:
            return bool(self._joining)
        early_s = self._digest_from - time.monotonic()
        if early_s > 0:
            if seconds is None:
                time.sleep(min(early_s, _POLL_S))
            return True
        try:
            with self._context.phase(f"verifying version {command.version}"), _one_thread():
                started = time.perf_counter()
                is_done = digest.advance(_SLICE_S if seconds is None else seconds)
                self._digest_s += time.perf_counter() - started
                if is_done:
                    self._report_digest(command, digest)
        except Exception as error:
            self.abandon_digest()
            self._context.fail(command.command_id, error)
        return self._digest is not None or bool(self._joining)

    def digests(self, version: int) -> tuple[bytes, ...]:
        """Return the digests for an `ReportDigests` reply, computed at once. Raises `RefitError`."""
        digest = self._holder.digest_task(self._sampling(version))
        digest.advance(math.inf)
        return tuple(map(comparison.to_bytes, digest.results()))

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
        self._joining.clear()

    def _install(self, command: InstallProgram) -> None:
        self.abandon_digest()
        programs = [program.decode(encoded) for encoded in command.programs]
        self._quantises = any(each.quantisations for each in programs)
        bound = self._holder.install(programs)
        reply = ProgramInstalled(command_id=command.command_id, num_copies=bound.num_copies, num_bytes=bound.num_bytes)
        self._context.reply(command.command_id, reply)

    def _connect(self, command: ConnectTransferGroup) -> None:
        # A process that it waits for may be dead and need replacing, so this must not block anything else.
        self._joining[command.transfer_group] = joining.begin(command, self._context)

    def _go_on_joining(self, group: Joining) -> None:
        """Connect a transfer group if all its processes are there."""
        command = group.command
        try:
            left_s = group.deadline - time.monotonic()
            if left_s > 0 and process_group.absent(group.transfer_group, group.store):
                time.sleep(_POLL_S)
                return
            del self._joining[command.transfer_group]
            with self._context.phase(f"connecting transfer group {command.transfer_group}"):
                self._holder.connect(group.transfer_group, group.meeting, max(left_s, _POLL_S))
            self._context.reply(
                command.command_id,
                TransferGroupConnected(command_id=command.command_id, transfer_group=command.transfer_group),
            )
        except Exception as error:
            self._joining.pop(command.transfer_group, None)
            self._context.fail(command.command_id, error)

    def _refit(self, command: Refit) -> None:
        if not command.only or self._context.name in command.only:  # a process that only sends continues its digest
            self.abandon_digest()
        memory = MemoryMeter()
        memory.begin()
        if command.whole and isinstance(self._holder, Weights):  # only trainers send differences
            self._holder.distrust(command.whole)
        started = time.perf_counter()
        num_bytes = self._holder.apply(command.version, command.deadline_s, command.only, command.joining_engines)
        reply = Refitted(
            command_id=command.command_id,
            version=command.version,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - started,
            memory=memory.use(),
        )
        self._context.reply(command.command_id, reply)

    def _begin_digest(self, command: ReportDigests) -> None:
        self._command, self._digest_s = command, 0.0
        self._digest = self._holder.digest_task(self._sampling(command.version))
        self._digest_from = time.monotonic() + _PATIENCE * self._digest.expected_s

    def _sampling(self, version: int) -> Sampling | None:
        return Sampling(version, _SAMPLED_ONE_IN) if self._verify == "sampled" else None

    def _report_digest(self, command: ReportDigests, digest: Digesting) -> None:
        wrong = self._holder.misquantised() if self._quantises else ()
        if wrong:
            raise RefitError(f"{', '.join(wrong)}: the weights held are not the quantisation of those received")
        reply = DigestsReported(
            command_id=command.command_id,
            version=command.version,
            digests=tuple(map(comparison.to_bytes, digest.results())),
            seconds=self._digest_s,
        )
        self.abandon_digest()
        self._context.reply(command.command_id, reply)
