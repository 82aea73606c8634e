"""Publish weights: bring a version from the trainers to each engine, and prove that it is there.

One publication is a transaction of every engine, with one deadline::

    refit ─▶ the engine holds the version ─▶ digests ─▶ compared: attested ─▶ recorded
                                             `── beside generation; no sample is trained on before the end ──┘

An engine is quarantined when its part of a refit fails, or when its digests differ from the trainers': it is refitted
once more, and if that fails too, so does the run. One that is lost is replaced, and the new process is built, gets its
transfer program, and is brought to the current version while trainers and other engines go on (`engine_recovery`). So
is one that joins beside the others (`arrivals`), and one may leave (`departures`).

Where trainers keep a copy for engines to read (`RunSpec.keeps_copy`), a version begins with that copy and with the
digests of what was copied. Trainers go on at once, and the copy is read, by engines that come late too, until the next
one is ordered: when nobody reads it and all that was read is proven. A version that no engine had time for is skipped.

`Publication` knows how far the version is, and takes what concerns weights of what happens. The rules that bring it to
engines are in `publishing`. Whose samples no longer count it says in `suspects`. It raises `ServiceError` where the run
cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.common.errors import CommandFailed, DeadlineExceeded
from tandem.common.messages import (
    Attested,
    CopyWeights,
    Failed,
    Reply,
    TransfersPlanned,
    VersionCommitted,
    WeightsCopied,
)
from tandem.coordinator.scheduler.agenda import Changed, Table, Tracked
from tandem.coordinator.scheduler.arrivals import Arrivals
from tandem.coordinator.scheduler.attestation import Attestation
from tandem.coordinator.scheduler.engine_recovery import MOST_FAILURES, EngineRecovery
from tandem.coordinator.scheduler.engines import Engine, EngineTable, Status
from tandem.coordinator.scheduler.events import Action, Dispatch, Say
from tandem.coordinator.scheduler.meshes import Meshes
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.refit_record import RefitProgress
from tandem.coordinator.scheduler.replacements import Replacements
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.service_recovery import ServiceRecovery
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.transfers import SERVICE, Transfers


class Publication(Tracked):
    """The newest version of the trainers' weights, on its way to engines."""

    def __init__(self, spec: RunSpec, requests: PendingRequests, changes: Callable[[Table], Changed]) -> None:
        changed = changes(Table.WEIGHTS)
        super().__init__(changed)
        self._changed_joining, self._changed_suspects = changes(Table.JOINING), changes(Table.SUSPECTS)
        self.spec = spec
        self.requests = requests
        self.transfers = Transfers(spec, requests)
        self.engines = EngineTable(spec.departed, changes(Table.ENGINES), changes(Table.LEAVING))
        self.suspects: list[str] = []
        """Engines whose samples do not count any more; whoever reads it empties it."""
        self.version = -1
        """What trainers hold, or have held before the step they are in."""
        self.has_update = False
        """Whether it must differ from the version before."""
        self.is_readable = False
        """Whether trainers hold it still, or their copy, so that engines can be brought to it."""
        self._uncopied: set[str] = set()
        """Trainers that have yet to copy it."""
        self.is_begun = False
        """Whether any engine was."""
        self.is_transferred = False
        """Whether every engine that it was begun with holds it, and digests are taken."""
        self.num_behind = 0
        """Engines that hold an older version than what is offered."""
        self.trainers: list[str] = []
        self.record = RefitProgress(changed)
        self.attestation = Attestation(spec, requests, self.engines, changed)
        self.meshes = Meshes(self.transfers, self.engines, requests, changed)
        self.service = ServiceRecovery(spec, requests, self.transfers, self.attestation, changed)
        self.newcomers: list[str] = []
        """Engines that have joined the others; whoever reads it empties it."""
        self.arrivals = Arrivals(requests, self.transfers, changes(Table.JOINING))
        self.may_address_all = True
        """Whether a refit can be for all that have a program, so that nobody need be named: nobody has left."""
        self._recovery = EngineRecovery(spec, requests, self.engines, self.transfers, self.meshes)
        self.replacements = Replacements(spec.max_replacements, spec.replacement_window_s, spec.replaced_at)

    # --- what the scheduler asks -------------------------------------------------------------------------------------

    @property
    def is_transferring(self) -> bool:
        """Whether the version that trainers hold is on its way to the first engines that get it."""
        if self._uncopied:
            return len(self.engines) > 0
        is_on_its_way = self.is_begun or self.spec.is_synchronous
        return self.is_readable and is_on_its_way and not self.is_transferred and len(self.engines) > 0

    @property
    def holds_up_step(self) -> bool:
        """Whether the step that has made the version is not over before that has happened."""
        return self.is_transferring and (bool(self._uncopied) or not self._outlasts_step)

    @property
    def is_settled(self) -> bool:
        """Whether every engine has what it needs of the version that trainers hold, and that is proven."""
        if not len(self.engines):
            return True
        is_read = self.is_transferred and not self.engines.num_having(Status.REFITTING)
        return is_read and not self.is_attesting and self.is_everything_attested()

    @property
    def is_attesting(self) -> bool:
        """Whether it is yet to be proven that an engine holds what it should."""
        return self.attestation.is_going_on

    @property
    def may_offer(self) -> bool:
        """Whether nobody reads the version of before, and what was read is proven."""
        return not self.is_attesting and not self.engines.num_having(Status.REFITTING)

    @property
    def may_step(self) -> bool:
        """Whether trainers may change their weights: nobody needs those of before any more, or there is a copy.

        Synchronous training waits until they are proven, too. Else that goes on beside the step.
        """
        if self.spec.is_synchronous or not len(self.engines):
            return self.is_settled
        if self._outlasts_step:
            return self.is_readable
        is_read = self.is_transferred and not self.num_behind
        is_read &= not self.engines.num_having(Status.READY, Status.REFITTING)
        return is_read and not self.attestation.needs_trainers

    def is_proven(self, name: str, version: int) -> bool:
        """Tell whether what an engine made with a version, and before, was made with what trainers held."""
        engine = self.engines.get(name)
        # No engine takes a version before the one that it has is attested.
        return engine is None or version < engine.version or engine.is_attested

    def can_generate(self, engine: str, oldest_version: int, newest_version: int) -> bool:
        """Tell whether an engine holds weights within these bounds, and need not finish what it has to take others."""
        state = self.engines.get(engine)
        return (
            state is not None
            and state.status is Status.HOLDING
            and state.leave_by is None
            and self._is_transferred_to(state)
            and (self.spec.updates_in_flight or not self.is_behind(state))
            and oldest_version <= state.version <= newest_version
        )

    def overdue(self) -> DeadlineExceeded | None:
        """Return the error of a replacement that did not come in time."""
        for name in self.engines.leaving() if len(self.arrivals) else ():  # it is not waited for whoever is there
            self.engines[name].replace_by = self.requests.now + self.spec.deadlines.join
        return self._recovery.overdue() or self.service.overdue()

    def dispensable(self) -> tuple[Engine, str] | None:
        """Return an engine that is lost and without which the others can go on, and why nobody is to replace it.

        Its replacement is overdue; or it was started by hand, and enough others were, such as that which was started
        again before it was known to be lost.
        """
        engines = self.engines
        absent = engines.having(Status.ABSENT)
        num_there = len({*engines.staying()} - {*absent})
        if not num_there:  # as in a run over a data set, which expects none
            return None
        is_enough = num_there >= self.spec.expected["rollout"]
        for name in absent:
            engine = engines[name]
            if engine.is_vacant or self.meshes.has_others(name):
                continue
            if engine.is_awaited_by_hand and is_enough:
                return engine, "it was lost, and as many others are there as the run began with"
            if self._recovery.is_overdue(engine):
                return engine, f"it was lost, and no process has taken its place within {self.spec.deadlines.join:g} s"
        return None

    @property
    def _outlasts_step(self) -> bool:
        """Whether engines can read a version while trainers step: there is a copy, and no trainer has to send it."""
        return self.spec.keeps_copy and not self.transfers.plan.senders

    def _is_transferred_to(self, engine: Engine) -> bool:
        """Tell whether an engine may serve tokens; in synchronous training once the others hold the version as well."""
        if not self.spec.is_synchronous:
            return True
        return self.is_transferred or engine.version < self.version or not self.is_readable

    # --- what the rules in `publishing` ask --------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether every engine has the version, and all of that is proven and recorded, as it is most of the time."""
        if not len(self.engines):
            return True
        is_read = self.is_transferred and not self.num_behind
        return is_read and self.engines.num_attested == len(self.engines) and not self.record.engines

    @property
    def is_any_joining(self) -> bool:
        """Whether an engine has joined the others, or is on its way."""
        return bool(self.newcomers) or len(self.arrivals) > 0

    def is_everything_attested(self) -> bool:
        """Tell whether no engine holds what is not attested; in synchronous training, whether all hold the version."""
        expected = len(self.engines) if self.spec.is_synchronous else self.engines.num_having(Status.HOLDING)
        return self.engines.num_attested == expected

    def is_behind(self, engine: Engine) -> bool:
        """Tell whether an engine can be brought to a newer version than the one it holds."""
        return self.is_readable and engine.status is Status.HOLDING and engine.version < self.version

    def attest(self, members: list[str]) -> list[Action]:
        """Have digests taken of what these members hold of the version."""
        return self.attestation.order(members, self.version, self.remaining_s())

    def begin_record(self, deadline: float) -> None:
        """Begin anew to take note of what happens to the version; `deadline` is that of its refit."""
        self.record = RefitProgress(self._changed, started_at=self.requests.now, deadline=deadline)

    def remaining_s(self) -> float:
        """Return what is left of the refit's deadline; a little, if none is, so that the error is the order's own."""
        return max(self.record.deadline - self.requests.now, 1.0)

    # --- what the scheduler says -------------------------------------------------------------------------------------

    def begin(self, trainers: list[str], engines: list[str]) -> list[Action]:
        """Enter the processes of the run, whose transfers are planned, installed and connected."""
        self.trainers = trainers
        self.engines.fill(engines)
        if not self.spec.keeps_copy or self._outlasts_step:
            return []
        return [
            Say(
                text="refit.keep_copy changes nothing but memory here: trainers send weights to engines themselves, "
                "and step only then"
            )
        ]

    def offer(self, version: int, *, has_update: bool) -> list[Action]:
        """Take note that trainers hold a version, which engines may be brought to until `withdraw`; or have it copied.

        Only when `may_offer`.
        """
        is_skipped = self.version >= 0 and not self.is_begun
        self.version = version
        self.has_update = has_update or (is_skipped and self.has_update)
        self.is_begun = self.is_transferred = False
        for name in self.engines:
            self.engines[name].num_failures = 0
        self.attestation.begin_version()
        if not self.spec.keeps_copy:
            self._make_readable()
            return []
        self.is_readable = False
        self._uncopied = {*self.trainers}
        return [
            Dispatch(
                member=rank,
                order=CopyWeights(
                    version=version,
                    with_digests=self.spec.is_verified,
                    **self.requests.open(rank, Phase.COPYING, self.spec.deadlines.refit),
                ),
            )
            for rank in self.trainers
        ]

    def withdraw(self) -> None:
        """Take note that trainers begin to step: the version can be read no longer, unless from a copy."""
        self.is_readable = self._outlasts_step

    def resume(self) -> None:
        """Take note that trainers have not stepped: the version can be read as before `withdraw`."""
        self.is_readable = True

    def stop(self) -> None:
        """Ask nothing more of engines: the run is being interrupted."""
        self.meshes.stop()
        self.arrivals.stop()
        self.engines.fill([])
        self.is_transferred = False

    # --- events ------------------------------------------------------------------------------------------------------

    def take_reply(self, member: str, reply: Reply) -> list[Action]:
        """Take a reply that answers a pending request of the weight plane or of its set-up."""
        if member in self.arrivals or self.arrivals.is_planned_by(reply.command_id):
            actions, entering = self.arrivals.take_reply(member, reply)
            for name in entering:
                self._enter(name)
            return actions
        self.transfers.take(member, reply)
        match reply:
            case Attested(digests=digests):
                self.attestation.take_digests(member, digests)
                return []
            case WeightsCopied(digests=digests):
                self.attestation.take_digests(member, digests)
                self._uncopied = self._uncopied - {member}
                if not self._uncopied:
                    self._make_readable()
                return []
            case VersionCommitted():
                self._take_committed(reply)
                return []
            case TransfersPlanned() if self.version >= 0:  # from one in the place of a refit service that is lost
                self.record.deadline = max(self.record.deadline, self.requests.now + self.spec.deadlines.refit)
                if self.is_transferred:
                    self.attestation.prove_again(self.version)
                return []
            case _:
                pass
        engine = self.engines.get(member)
        if self.meshes.take_reply(reply.command_id) or engine is None or reply.command_id not in engine.awaited:
            return []
        engine.awaited.discard(reply.command_id)
        if engine.awaited:
            return []
        if engine.status is not Status.REFITTING:
            return self._recovery.go_on(engine)
        self.engines.move(engine, Status.HOLDING)
        engine.has_frozen = True
        return self.attest([engine.name]) if self.is_transferred else []

    def take_failure(self, member: str, failed: Failed, phase: Phase) -> None:
        """Take the failure of a member's part in a refit, or of an engine's in its attestation: `phase` says which.

        Quarantines the engine, or raises `CommandFailed`.
        """
        if not len(self.engines):
            return
        engine = self.engines.get(member)
        # Of a refit, an engine that only passes weights on fails like any sender.
        if engine is not None and (phase is Phase.ATTESTING or failed.command_id in engine.awaited):
            self._quarantine(engine, failed.phase, failed.account)
            return
        # A sender fails when its receiver does, which then says so itself or is lost; what matters is who holds what.
        times = self.record.num_failures_to_send
        times[member] = times.get(member, 0) + 1
        if times[member] > (MOST_FAILURES + self.spec.max_replacements) * len(self.engines):
            raise CommandFailed(member, failed.phase, failed.account)

    def take_loss(self, name: str, doing: str, why: str) -> list[Action]:
        """Ask for a replacement of an engine. Raises `ServiceLost` if it was replaced too often."""
        engine = self.engines[name]
        self.replacements.count(self.requests.now, name, doing, why)
        self.requests.drop(name)
        self._forget(engine)
        if not self.record.seconds:  # what comes is a refit of this engine alone
            self.begin_record(self.record.deadline)
        return self._recovery.replace(engine, why)

    def let_go(self, engine: Engine, *, is_last: bool) -> None:
        """Do without an engine that leaves. Where none is left, or others got weights from it, another must come."""
        name = engine.name
        self.requests.drop(name)
        self.meshes.stop_connecting(name)
        self._forget(engine)
        while name in self.suspects:
            self.suspects.remove(name)
            self._changed_suspects()
        self.may_address_all = False
        if not is_last and not self.meshes.has_others(name):
            self.engines.remove(name)
            return
        self._recovery.vacate(engine)
        if is_last:
            self.engines.leave_vacant(engine)

    def take_replacement(self, name: str) -> list[Action]:
        """Begin to bring a new process to where the others are."""
        return self._recovery.rebuild(name)

    def take_loss_of_service(self, doing: str, why: str) -> list[Action]:
        """Ask for a replacement of the refit service. Raises `ServiceLost` if too many were lost."""
        self.replacements.count(self.requests.now, SERVICE, doing, why)
        self.arrivals.plan_again()
        return self.service.replace(why)

    def take_service(self) -> list[Action]:
        """Tell a process in the place of the refit service what it has to know."""
        return self.service.take_joined(self.trainers, [*self.engines.names(), *self.arrivals.planned()])

    def _take_committed(self, reply: VersionCommitted) -> None:
        attested, differing = self.attestation.take_compared(reply)
        self.record.engines += [engine.name for engine in attested]
        for engine in differing:
            what = f"it does not hold version {reply.version}: {reply.differing[engine.name]}"
            self._quarantine(engine, Phase.ATTESTING.value, what)
        self.record.digest = reply.digest

    def _make_readable(self) -> None:
        self.is_readable = True
        self.num_behind = self.engines.num_having(Status.HOLDING)

    def _enter(self, name: str) -> None:
        """Have an engine that has joined brought to where the others are."""
        self.engines.add(name)
        self.newcomers.append(name)
        self._changed_joining()
        if self.is_transferred and not self.record.seconds:  # what comes is a refit of this engine alone
            self.begin_record(self.record.deadline)

    # --- one engine --------------------------------------------------------------------------------------------------

    def _quarantine(self, engine: Engine, doing: str, why: str) -> None:
        """Have an engine refitted once more. Raises `CommandFailed` if it has had its second attempt."""
        self._recovery.count_failure(engine, doing, why)
        self.record.quarantined[engine.name] = why
        self.requests.drop(engine.name, Phase.REFITTING, Phase.ATTESTING)
        self._forget(engine)
        self._recovery.refit_again(engine)

    def _forget(self, engine: Engine) -> None:
        """Forget what an engine held: neither its digests count, nor what it made."""
        self.num_behind -= self.is_behind(engine)
        engine.has_frozen = False
        self.attestation.forget(engine.name)
        self.suspects.append(engine.name)
        self._changed_suspects()
