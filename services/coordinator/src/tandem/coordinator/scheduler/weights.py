"""The newest version of the weights: its way to each engine, verified; and a lost refit service.

A version reaches every engine in one transaction, with one deadline::

    refit ─▶ the engine holds the version ─▶ digests ─▶ compared: verified ─▶ recorded
                                             `── beside generation; no sample is trained on before the end ──┘

If trainers keep a copy for engines to read (`RunSpec.keeps_copy`), a version begins with that copy and its digests.
Trainers go on at once. Engines, also late ones, read the copy until the next one is requested. That happens when no
engine reads it and all that was read is verified. A version that no engine had time for is skipped.

Engines hold the trainers' weights if the bytes counted and the digests say so::

    digests are asked for ─▶ all of them have come ─▶ the refit service compares them ─▶ equal: the engine is verified

`RefitProgress` goes into the journal once all engines are verified.

`NewestVersion` knows how far it is. The rule that brings it to engines is in `rules.publishing`. Engines that are lost
or invalidated meanwhile are handled in `rules.recovery`.

A lost refit service::

    lost ─▶ replaced ─▶ it is told the layouts that processes still have ─▶ the version is verified once more

Weights go on moving, by the installed programs. Only the comparison of digests waits, and begins anew.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from tandem.common.errors import CommandFailed, DeadlineExceeded
from tandem.common.messages import CommitVersion, CopyWeights, Refitted, ReportDigests, TransfersPlanned
from tandem.common.worker_shards import map_by_shard, process_of
from tandem.coordinator.scheduler.agenda import Changed, Tracked
from tandem.coordinator.scheduler.engines.table import EngineState, EngineStatus, EngineTable
from tandem.coordinator.scheduler.engines.transfers import SERVICE, TransferGroups, TransferPlanner
from tandem.coordinator.scheduler.events import Action, DispatchCommand, RecordRefit, ReplaceEngine, TellUser
from tandem.coordinator.scheduler.requests import PendingRequests, RunPhase
from tandem.coordinator.scheduler.spec import RunSpec


class RefitServicePresence(Tracked):
    """Whether the refit service is there, and the progress of its replacement."""

    def __init__(
        self,
        spec: RunSpec,
        requests: PendingRequests,
        transfers: TransferPlanner,
        verification: VersionVerification,
        changed: Changed,
    ) -> None:
        super().__init__(changed)
        self._join_s = spec.deadlines.join
        self._requests = requests
        self._transfers = transfers
        self._verification = verification
        self.is_absent = False
        """Whether a replacement is awaited."""
        self._replace_by = 0.0

    def replace(self, reason: str) -> list[Action]:
        """Ask for a replacement."""
        self._requests.drop(SERVICE)
        self._verification.forget_comparison()
        self.is_absent = True
        self._replace_by = self._requests.now + self._join_s
        return [ReplaceEngine(process=SERVICE, reason=reason)]

    def take_joined(self, trainers: Sequence[str], engines: Sequence[str]) -> list[Action]:
        """Tell the replacement which layouts the processes hold and want."""
        self.is_absent = False
        return [self._transfers.request_plan(trainers, engines)]

    def overdue(self) -> DeadlineExceeded | None:
        """Return the error for an overdue replacement."""
        if not self.is_absent or self._requests.now <= self._replace_by:
            return None
        message = f"no process has taken its place within {self._join_s:g} s"
        return DeadlineExceeded(SERVICE, EngineStatus.ABSENT.value, message)


class VersionState(enum.Enum):
    """How far the newest version is on its way to the engines."""

    NONE = "there is none"
    COPYING = "trainers copy it"
    OFFERED = "engines may be brought to it"
    UNDER_WAY = "engines are brought to it"
    ARRIVED = "every engine that it was begun with holds it"
    WITHDRAWN = "they hold it, and trainers no longer have it"


READABLE = (VersionState.OFFERED, VersionState.UNDER_WAY, VersionState.ARRIVED)
"""The states in which trainers, or their copies, still have it, so that engines can be brought to it."""
HAS_ARRIVED = (VersionState.ARRIVED, VersionState.WITHDRAWN)
"""The states after every engine that it was begun with holds it, and digests are taken."""


class NewestVersion(Tracked):
    """The newest version of the trainers' weights, on its way to engines."""

    def __init__(
        self,
        spec: RunSpec,
        requests: PendingRequests,
        engines: EngineTable,
        transfers: TransferPlanner,
        changed: Changed,
    ) -> None:
        super().__init__(changed)
        self._spec = spec
        self._is_synchronous = spec.is_synchronous
        self._requests = requests
        self._engines = engines
        self._transfers = transfers
        self.version = -1
        """The version that trainers hold, or held before the step in progress."""
        self.state = VersionState.NONE
        self.has_update = False
        """Whether it must differ from the version before."""
        self._uncopied: set[str] = set()
        """Trainers that have yet to copy it."""
        self.num_behind = 0
        """Engines that hold an older version than the newest one."""
        self.trainers: list[str] = []
        self.outlasts_step = False
        """Whether engines can read a version while trainers step: there is a copy, and no trainer has to send it."""
        self.record = RefitProgress(changed)
        self.verification = VersionVerification(spec, requests, engines, transfers, changed)
        self.transfer_groups = TransferGroups(transfers, engines, requests, changed)
        self.may_address_all = True
        """Whether a refit can address all processes with a program without naming them, as no engine has left."""

    # --- what the scheduler asks -------------------------------------------------------------------------------------

    @property
    def is_transferring(self) -> bool:
        """Whether the version that trainers hold is on its way to its first engines."""
        is_to_begin = self.state is VersionState.OFFERED and self._is_synchronous
        is_on_its_way = is_to_begin or self.state in (VersionState.COPYING, VersionState.UNDER_WAY)
        return is_on_its_way and len(self._engines) > 0

    @property
    def may_offer(self) -> bool:
        """Whether no engine reads the version before, and what was read is verified."""
        return not self.verification.is_going_on and not self._engines.num_having(EngineStatus.REFITTING)

    @property
    def is_settled(self) -> bool:
        """Whether every engine has what it needs of the trainers' version, and that is verified."""
        return not len(self._engines) or (self.state in HAS_ARRIVED and self.may_offer and self.is_everything_verified)

    @property
    def is_everything_verified(self) -> bool:
        """Whether every engine that must be is verified: in synchronous training all, else those with a version."""
        expected = len(self._engines) if self._is_synchronous else self._engines.num_having(EngineStatus.HOLDING)
        return self._engines.num_verified == expected

    @property
    def is_done(self) -> bool:
        """Whether every engine has the version, and all of it is verified and recorded, as is usual."""
        if not len(self._engines):
            return True
        is_read = self.state in HAS_ARRIVED and not self.num_behind
        return is_read and self._engines.num_verified == len(self._engines) and not self.record.engines

    @property
    def may_step(self) -> bool:
        """Whether trainers may change their weights, because no engine needs the old ones or there is a copy.

        Synchronous training also waits until they are verified. Otherwise verification goes on beside the step.
        """
        if self._is_synchronous or not len(self._engines):
            return self.is_settled
        if self.outlasts_step:
            return self.state in READABLE
        is_read = self.state in HAS_ARRIVED and not self.num_behind
        is_read &= not self._engines.num_having(EngineStatus.READY, EngineStatus.REFITTING)
        return is_read and not self.verification.needs_trainers

    def is_proven(self, name: str, version: int) -> bool:
        """Tell whether the samples that an engine made with a version, and before, were made with verified weights."""
        engine = self._engines.get(name)
        # No engine takes a version before its present one is verified.
        return engine is None or version < engine.version or engine.is_verified

    def can_generate(self, name: str, oldest_version: int, newest_version: int) -> bool:
        """Tell whether an engine holds weights within these bounds, and need not finish its samples to take others.

        In synchronous training, the others must hold the newest version as well.
        """
        engine = self._engines.get(name)
        if engine is None or engine.status is not EngineStatus.HOLDING or engine.leave_by is not None:
            return False
        if not oldest_version <= engine.version <= newest_version:
            return False
        if engine.version == self.version:
            return not self._is_synchronous or self.state not in (VersionState.OFFERED, VersionState.UNDER_WAY)
        return self._spec.updates_in_flight or not self.is_behind(engine)

    def is_behind(self, engine: EngineState) -> bool:
        """Tell whether an engine can be brought to a newer version than its own."""
        return self.state in READABLE and engine.status is EngineStatus.HOLDING and engine.version < self.version

    def begin_record(self, deadline: float) -> None:
        """Begin a new record of the version; `deadline` is that of its refit."""
        self.record = RefitProgress(self._changed, started_at=self._requests.now, deadline=deadline)

    def remaining_s(self) -> float:
        """Return the rest of the refit's deadline, at least a little, so that a late error is the command's own."""
        return max(self.record.deadline - self._requests.now, 1.0)

    # --- what the scheduler says -------------------------------------------------------------------------------------

    def begin(self, trainers: list[str], engines: list[str]) -> list[Action]:
        """Enter the processes of the run, now that transfers are planned, installed and connected."""
        self.trainers = trainers
        self._engines.fill(engines)
        self.outlasts_step = self._spec.keeps_copy and not self._transfers.plan.senders
        if not self._spec.keeps_copy or self.outlasts_step:
            return []
        return [
            TellUser(
                text="refit.keep_copy changes nothing but memory here: trainers send weights to engines themselves, "
                "and step only then"
            )
        ]

    def offer(self, version: int, *, has_update: bool) -> list[Action]:
        """Note that trainers hold a version, which engines may be brought to until `withdraw`, or copy it.

        Call it only when `may_offer`.
        """
        self.has_update = has_update or (self.state is VersionState.OFFERED and self.has_update)
        self.version = version
        for name in self._engines:
            self._engines[name].num_failures = 0
        self.verification.begin_version()
        if not self._spec.keeps_copy:
            self._let_engines_read()
            return []
        self.state = VersionState.COPYING
        self._uncopied = {*self.trainers}
        return [
            DispatchCommand(
                process=rank,
                command=CopyWeights(
                    version=version,
                    with_digests=self._spec.is_verified,
                    **self._requests.open(rank, RunPhase.COPYING, self._spec.deadlines.refit),
                ),
            )
            for rank in self.trainers
        ]

    def withdraw(self) -> None:
        """Note that trainers begin to step. The version can no longer be read, unless from a copy."""
        if self.state is VersionState.ARRIVED and not self.outlasts_step:
            self.state = VersionState.WITHDRAWN

    def resume(self) -> None:
        """Note that trainers have not stepped. The version can be read as before `withdraw`."""
        if self.state is VersionState.WITHDRAWN:
            self.state = VersionState.ARRIVED

    def stop(self) -> None:
        """Ask nothing more of engines, because the run is being interrupted."""
        self.transfer_groups.stop()
        self._engines.fill([])
        self.state = VersionState.NONE

    def take_copied(self, trainer: str, digests: tuple[bytes, ...]) -> None:
        """Note that a trainer has copied the version. Once all have, engines can read it."""
        self.verification.take_digests(trainer, digests)
        self._uncopied = self._uncopied - {trainer}
        if not self._uncopied:
            self._let_engines_read()

    def take_service(self) -> None:
        """Note that a replacement of the refit service is able. What was verified is verified again."""
        self.record.deadline = max(self.record.deadline, self._requests.now + self._spec.deadlines.refit)
        if self.state in HAS_ARRIVED:
            self.verification.prove_again(self.version)

    def forget(self, engine: EngineState) -> None:
        """Forget an engine's weights: their digests do not count, and samples made with them are generated again."""
        self.num_behind -= self.is_behind(engine)
        engine.has_frozen = False
        self.verification.forget(engine.name)
        self._engines.invalidate(engine.name)

    def expect_one(self) -> None:
        """Note that one engine is to be brought to the version by itself, if the others hold it."""
        if not self.record.seconds:
            self.begin_record(self.record.deadline)

    def _let_engines_read(self) -> None:
        self.state = VersionState.OFFERED
        self.num_behind = self._engines.num_having(EngineStatus.HOLDING)


class VersionVerification:
    """The digests of one version that are known so far, and the processes that have yet to send theirs."""

    def __init__(
        self,
        spec: RunSpec,
        requests: PendingRequests,
        engines: EngineTable,
        transfers: TransferPlanner,
        changed: Changed,
    ) -> None:
        self._changed = changed
        self._spec = spec
        self._transfers = transfers
        self._is_verified = spec.is_verified
        self._requests = requests
        self._engines = engines
        self._digests: dict[str, dict[str, bytes]] = {}
        """Digests of the weights that each process holds, by slice."""
        self.awaited: set[str] = set()
        """Processes that were asked for digests and have not sent them."""
        self.comparing: list[str] | None = None
        """Engines with digests that the refit service is comparing; None if it compares none."""
        self._joining_engines: dict[int, tuple[str, ...]] = {}
        """The engines that also get the weights that never change, by the id of the pending refit command."""

    @property
    def is_going_on(self) -> bool:
        """Whether an engine has yet to be verified."""
        is_asked = bool(self.awaited) or self.comparing is not None
        return len(self._engines) > 0 and (is_asked or self._engines.are_any_unverified)

    @property
    def needs_trainers(self) -> bool:
        """Whether trainers have yet to take digests of weights that must not change before."""
        return any(process not in self._engines for process in self.awaited)

    def note_joining(self, command_id: int, joining_engines: tuple[str, ...]) -> None:
        """Note the engines that also get the weights that never change with this refit."""
        self._joining_engines[command_id] = joining_engines

    def check_bytes(self, process: str, reply: Refitted) -> None:
        """Raise `CommandFailed` if a link carried more or fewer bytes than planned; differences may be fewer."""
        plan, joining_engines = self._transfers.plan, self._joining_engines.pop(reply.command_id, ())
        for link, counted in reply.num_bytes.items():
            planned = plan.num_bytes.get(link)
            if joining_engines and process_of(link.rpartition(">")[2]) in joining_engines:
                frozen = plan.num_bytes_frozen.get(link)
                planned = planned if frozen is None else (planned or 0) + frozen
            is_fewer = self._spec.sends_differences and planned is not None and counted <= planned
            if counted != planned and not is_fewer:
                mismatch = f"{counted} bytes were counted on {link}, where {planned or 'none'} were planned"
                raise CommandFailed(process, RunPhase.REFITTING.value, mismatch)

    def begin_version(self) -> None:
        """Forget the digests of the version before."""
        self._digests = {}
        self._changed()

    def request_digests(self, processes: Sequence[str], version: int, allowed_s: float) -> list[Action]:
        """Take digests of the version on these processes, unless the run does not verify."""
        if not self._is_verified:
            return []
        self.awaited.update(processes)
        self._changed()
        actions: list[Action] = []
        for process in processes:
            fields = self._requests.open(process, RunPhase.VERIFYING, allowed_s)
            actions.append(DispatchCommand(process=process, command=ReportDigests(version=version, **fields)))
        return actions

    def take_digests(self, process: str, digests: tuple[bytes, ...]) -> None:
        """Note the digests of the weights that a process holds, or that a trainer has copied."""
        self._digests[process] = map_by_shard(process, digests)
        self.awaited.discard(process)
        self._changed()

    def compare(self, trainers: Sequence[str], version: int, allowed_s: float, *, has_update: bool) -> list[Action]:
        """Compare the digests of unverified engines with those of trainers, on the refit service."""
        waiting = [name for name in self._engines.having(EngineStatus.HOLDING) if not self._engines[name].is_verified]
        self.comparing = waiting
        self._changed()
        digests: dict[str, bytes] = {}
        for name in [*trainers, *waiting] if self._is_verified else []:
            digests |= self._digests[name]
        command = CommitVersion(
            version=version,
            digests=digests,
            has_update=has_update,
            **self._requests.open(SERVICE, RunPhase.VERIFYING, allowed_s),
        )
        return [DispatchCommand(process=SERVICE, command=command)]

    def end_comparison(self) -> list[str]:
        """Note that the refit service has compared digests; return the engines that they are of."""
        compared, self.comparing = self.comparing or [], None
        self._changed()
        return compared

    def forget_comparison(self) -> None:
        """Note that the refit service is lost, and its comparison with it."""
        self.comparing = None
        self._changed()

    def prove_again(self, version: int) -> None:
        """Verify engines again that hold a version and were verified, with the digests that are known."""
        for name in self._engines.having(EngineStatus.HOLDING):
            engine = self._engines[name]
            if engine.version == version and (name in self._digests or not self._is_verified):
                self._engines.verify(engine, is_verified=False)

    def forget(self, engine: str) -> None:
        """Forget the digests of an engine that is lost or invalidated."""
        self._digests.pop(engine, None)
        self.awaited.discard(engine)
        if self.comparing is not None and engine in self.comparing:
            self.comparing.remove(engine)
        self._changed()


class RefitProgress(Tracked):
    """The record of a version so far, which goes into the journal once all of it is verified."""

    def __init__(self, changed: Changed, *, started_at: float = 0.0, deadline: float = 0.0) -> None:
        super().__init__(changed)
        self.deadline = deadline
        self.seconds: dict[str, float] = {}
        self.engines: list[str] = []
        self.quarantined: dict[str, str] = {}
        self.digest: int | None = None
        """The digest of the version, once it is known."""
        self.num_failures_to_send: dict[str, int] = {}
        self._since = started_at

    def committed(self, version: int, plan: TransfersPlanned, now: float) -> RecordRefit:
        """Return the journal entry: the refit service has compared all digests."""
        assert self.digest is not None, "it comes with the comparison"
        self.note("commit", now)
        return RecordRefit(
            version=version,
            engines=tuple(sorted(set(self.engines))),
            seconds=self.seconds,
            digest=self.digest,
            predicted_s=plan.predicted_s,
            bound_s=plan.bound_s,
            quarantined=self.quarantined,
        )

    def note(self, phase: str, now: float) -> None:
        """Note the end of a phase: `transfer` ends when every engine holds the version, `verify` with the digests."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
