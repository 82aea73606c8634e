"""Weights in plain memory that take part in refits, and transfer programs bound to that memory.

Weights are a layout and the tensors of its storages. A transfer program is bound to them: every source is opened. Each
refit only runs it, and looks up no tensor.

Every process of a refit binds its own program. In each round, frozen tensors come first. Of either kind, transfers that
the receiver copies run before those that are sent, ordered by transport name, the same at every process. So a process
with a part in the first unfinished transfer has finished everything before it, and no two processes wait for each
other.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.digests.slices import DigestList, ElementSampling
from tandem.refit.digests.task import DigestTask, FrozenDigests, VersionDigest
from tandem.refit.installing import BoundMerging, BoundQuantisation
from tandem.refit.layout import Layout
from tandem.refit.program import ProcessVerification, Staging, TransferProgram
from tandem.refit.transfer import LinkTransfer, TransferGroup
from tandem.refit.transports import cuda_ipc, process_group, registry
from tandem.refit.transports.meeting import GroupStore
from tandem.refit.transports.memory import NamedStorages
from tandem.refit.transports.process_group import ConnectedGroup, poll
from tandem.refit.transports.store import HOST_VARIABLE
from tandem.refit.transports.stream import StreamTransport
from tandem.refit.transports.transport import BoundTransfers, TransferEnd

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return the host name used in layouts; two machines never share it, even with equal configured names.

    An engine that ``coordinator rollouts`` has started says that it is nowhere, wherever it is started again.
    """
    return os.environ.get(HOST_VARIABLE) or f"{socket.gethostname()}/{_BOOT_ID.read_text()[:8]}"


def device_name(device: torch.device) -> str:
    """Return the device name used in layouts."""
    return "cpu" if device.type == "cpu" else cuda_ipc.device_uuid(device)


def bind(
    program: TransferProgram,
    storages: Mapping[str, torch.Tensor],
    transfer_groups: Mapping[str, ConnectedGroup] | None = None,
) -> BoundProgram:
    """Bind a program to memory.

    Args:
        program: made by `tandem.refit.planner` for this process.
        storages: this process's live memory by storage name. Byte 0 of a storage is the first element of its tensor.
            A ``uint8`` tensor stands for memory of any type. Parameters that are read in place are re-pointed at the
            source's memory at once: each optimizer step is visible immediately, and a write to them faults.
        transfer_groups: the connected transfer groups of the program (`process_group.connect`), by name. They are
            looked up at each run, so they may be connected, or reconnected after a failure, once the program is bound.

    Raises:
        RefitError: a source cannot be opened, or memory differs from the plan. No parameter was changed.

    """
    member = program.member
    device = next((tensor.device for tensor in storages.values()), torch.device("cpu"))
    staging = {each.name: _allocate(each, device) for each in program.staging}
    if collisions := staging.keys() & storages.keys():
        raise RefitError(f"{member} has parameters named like staging memory: {', '.join(sorted(collisions))}")
    memory = NamedStorages(member, {**storages, **staging})
    own_transfer_groups = {transfer_group.name: transfer_group for transfer_group in program.transfer_groups}
    end = TransferEnd(
        member, memory, device, own_transfer_groups, {} if transfer_groups is None else transfer_groups, {}
    )
    rounds = _bind_rounds(program, end)
    quantisers = [BoundQuantisation(quantisation, memory) for quantisation in program.quantisations]
    for _, bound in (each for round_ in rounds for each in round_):
        bound.install()  # no parameter was touched before this line, and nothing can fail after it
    merger = None
    if program.merging is not None:  # planned memory was checked while binding; look it up again where it lies now
        merger = BoundMerging(member, program.merging, NamedStorages(member, {**storages, **staging}))
    return BoundProgram(member, rounds, quantisers, merger, staging, device)


def _allocate(staging: Staging, device: torch.device) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, staging.dtype)
    return torch.empty(staging.num_bytes // dtype.itemsize, dtype=dtype, device=device)


def _bind_rounds(program: TransferProgram, end: TransferEnd) -> list[list[tuple[bool, BoundTransfers]]]:
    """Bind the transfers of each round by transport, in running order: frozen tensors first."""
    grouped: dict[tuple[int, bool, bool, str], list[LinkTransfer]] = {}
    for transfer in (*program.receives, *program.sends):
        is_sent = registry.find(transfer.transport).is_sent
        key = transfer.round, not transfer.is_frozen, is_sent, transfer.transport
        grouped.setdefault(key, []).append(transfer)
    rounds: dict[int, list[tuple[bool, BoundTransfers]]] = {}
    for (number, changes, _, name), transfers in sorted(grouped.items(), key=lambda item: item[0]):
        transport = registry.find(name)
        # Engines that pass weights on share a host, and would have to keep what they passed on.
        if program.largest_difference and changes and number == 0 and transport.name == StreamTransport.name:
            from tandem.refit.transports.differences import DifferenceStream  # most runs need none of it

            transport = DifferenceStream(program.largest_difference)
        rounds.setdefault(number, []).append((not changes, transport.bind(transfers, end)))
    return list(rounds.values())


class Weights:
    """A `WeightHolder` of plain memory with one worker: a layout, and the live tensors of its storages.

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
        self._groups: dict[str, process_group.ConnectedGroup] = {}
        """Transfer groups by name; looked up whenever the program runs."""
        self._aliased: set[str] = set()
        """Storages that the installed program has re-pointed at the sender's memory."""

    @property
    def layouts(self) -> tuple[Layout]:
        """The layout, as that of the only worker."""
        return (self.layout,)

    @property
    def live(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the process computes with, by storage."""
        return self._live or self.storages

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

    def connect(self, transfer_group: TransferGroup, meeting: GroupStore, timeout_s: float) -> None:
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
        self, sampling: ElementSampling | None, copies: Mapping[str, torch.Tensor] | None = None
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
        verification: ProcessVerification,
        sampling: ElementSampling | None,
        digest_list: DigestList | None,
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
            digest_list=digest_list,
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


Rounds = Sequence[Sequence[tuple[bool, BoundTransfers]]]
"""Transfers by round; the flag marks those that move frozen tensors."""


class BoundProgram:
    """A transfer program bound to memory: its sources are open, its destinations are the process's live tensors."""

    staging: Mapping[str, torch.Tensor]
    """Memory beside the parameters, by its name in the program: inputs of quantising and merging."""
    num_copies: int
    num_bytes: int
    """Bytes that one run moves over this process's links, frozen tensors included."""
    merger: BoundMerging | None
    """Merger of weights and adapters, if the program merges."""

    def __init__(
        self,
        member: str,
        rounds: Rounds,
        quantisers: Sequence[BoundQuantisation],
        merger: BoundMerging | None,
        staging: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._member = member
        self._rounds = rounds
        self._quantisers = quantisers
        self.merger = merger
        self.staging = staging
        self._device = device
        self._is_closed = False
        self.num_copies = sum(bound.num_copies for round_ in rounds for _, bound in round_)
        self.num_bytes = sum(bound.num_bytes for round_ in rounds for _, bound in round_)

    def run(
        self, deadline_s: float, only: Collection[str] | None = None, joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Do this process's part of one refit, and return when all of it is done.

        Args:
            deadline_s: seconds until it fails.
            only: processes to serve, including this one if it is to receive; None for all.
            joining_engines: those among them that also get frozen tensors; None for all.

        Returns:
            bytes moved over each link, by ``source>destination``.

        Raises:
            RefitError: names this process, its operation, the peer and the tensor. Weights here may be partial.
                Links unrelated to the failure have been served.

        """
        assert not self._is_closed, "a program was run after it was closed"
        deadline = time.monotonic() + deadline_s
        counted: dict[str, int] = {}
        for round_ in self._rounds:
            errors: list[str] = []
            for is_frozen, bound in round_:
                try:
                    bound.run(deadline, joining_engines if is_frozen and joining_engines is not None else only, counted)
                except RefitError as error:
                    errors.append(str(error))
            if errors:
                raise RefitError("; ".join(errors))
        if only is None or process_of(self._member) in only:
            for quantiser in self._quantisers:
                if time.monotonic() > deadline:
                    raise RefitError(f"{self._member} failed while quantising: the deadline passed")
                quantiser.run()
            if self.merger is not None:
                self.merger.run(deadline)
        if self._device.type == "cuda":
            self._synchronise(deadline)
        return counted

    def distrust(self, engines: Collection[str]) -> None:
        """Send these engines whole weights next time, not what changed since those that they hold."""
        from tandem.refit.transports.differences import DifferenceStreams  # most runs need none of it

        for bound in (each for round_ in self._rounds for _, each in round_):
            if isinstance(bound, DifferenceStreams):
                bound.distrust(engines)

    def misquantised(self) -> tuple[str, ...]:
        """Quantise again, and return the tensors of which this process holds something else."""
        return tuple(name for quantiser in self._quantisers for name in quantiser.wrong())

    def close(self) -> None:
        """Release all memory. The groups that were given to `bind` stay open."""
        self._is_closed = True
        self._rounds = []
        self._quantisers = []
        self.merger = None
        self.staging = {}

    def _synchronise(self, deadline: float) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        if not poll(event.query, deadline):
            raise RefitError(f"{self._member} failed while installing: the deadline passed")
