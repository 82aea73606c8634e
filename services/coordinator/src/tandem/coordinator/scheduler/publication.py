"""Publish weights: bring a version from the trainers to each engine, and prove that it is there.

One publication is a transaction of every engine, with one deadline::

    refit ─▶ the engine holds the version ─▶ digests ─▶ compared: attested ─▶ recorded
                                             `── beside generation; no sample is trained on before the end ──┘

An engine is quarantined when its part of a refit fails, or when its digests differ from the trainers': it is refitted
once more, and if that fails too, so does the run. One that is lost is replaced, and the new process is built, gets its
transfer program, and is brought to the current version while trainers and other engines go on (`engine_recovery`).

Where trainers keep a copy for engines to read (`RunSpec.keeps_copy`), a version begins with that copy and with the
digests of what was copied. Trainers go on at once, and the copy is read, by engines that come late too, until the next
one is ordered: when nobody reads it and all that was read is proven. A version that no engine had time for is skipped.

`Publication` has the rules that fire here (`run_rules`), and takes what concerns weights of what happens. Whose samples
no longer count it says in `suspects`. It raises `ServiceError` where the run cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.common.errors import CommandFailed, DeadlineExceeded
from tandem.common.messages import Attested, CopyWeights, Failed, Refit, Reply, VersionCommitted, WeightsCopied
from tandem.coordinator.scheduler.attestation import Attestation
from tandem.coordinator.scheduler.engine_recovery import MOST_FAILURES, EngineRecovery
from tandem.coordinator.scheduler.engines import COMING_BACK, Engine, EngineTable, Status
from tandem.coordinator.scheduler.events import Action, Dispatch, Say
from tandem.coordinator.scheduler.meshes import Meshes
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.refit_record import RefitProgress
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.transfers import Transfers

_SHARE_OF_TRANSFER = 0.8
"""Of a refit's deadline. The rest is for whoever gives up then to say so: that names the peer and the tensor."""


class Publication:
    """The newest version of the trainers' weights, on its way to engines."""

    def __init__(self, spec: RunSpec, requests: PendingRequests) -> None:
        self._spec = spec
        self._requests = requests
        self.transfers = Transfers(spec, requests)
        self.engines = EngineTable()
        self.suspects: list[str] = []
        """Engines whose samples do not count any more; whoever reads it empties it."""
        self.version = -1
        """What trainers hold, or have held before the step they are in."""
        self._has_update = False
        """Whether it must differ from the version before."""
        self._is_readable = False
        """Whether trainers hold it still, or their copy, so that engines can be brought to it."""
        self._uncopied: set[str] = set()
        """Trainers that have yet to copy it."""
        self._is_begun = False
        """Whether any engine was."""
        self._is_transferred = False
        """Whether every engine that it was begun with holds it, and digests are taken."""
        self._num_behind = 0
        """Engines that hold an older version than what is offered."""
        self._trainers: list[str] = []
        self._record = RefitProgress()
        self._attestation = Attestation(spec, requests, self.engines)
        self._meshes = Meshes(self.transfers, self.engines, requests)
        self._recovery = EngineRecovery(spec, requests, self.engines, self.transfers, self._meshes)

    # --- what the scheduler asks -------------------------------------------------------------------------------------

    @property
    def is_transferring(self) -> bool:
        """Whether the version that trainers hold is on its way to the first engines that get it."""
        if self._uncopied:
            return len(self.engines) > 0
        is_on_its_way = self._is_begun or self._spec.is_synchronous
        return self._is_readable and is_on_its_way and not self._is_transferred and len(self.engines) > 0

    @property
    def holds_up_step(self) -> bool:
        """Whether the step that has made the version is not over before that has happened."""
        return self.is_transferring and (bool(self._uncopied) or not self._outlasts_step)

    @property
    def is_settled(self) -> bool:
        """Whether every engine has what it needs of the version that trainers hold, and that is proven."""
        if not len(self.engines):
            return True
        is_read = self._is_transferred and not self.engines.num_having(Status.REFITTING)
        return is_read and not self.is_attesting and self._is_everything_attested()

    @property
    def is_attesting(self) -> bool:
        """Whether it is yet to be proven that an engine holds what it should."""
        return self._attestation.is_going_on

    @property
    def may_offer(self) -> bool:
        """Whether nobody reads the version of before, and what was read is proven."""
        return not self.is_attesting and not self.engines.num_having(Status.REFITTING)

    @property
    def may_step(self) -> bool:
        """Whether trainers may change their weights: nobody needs those of before any more, or there is a copy.

        Synchronous training waits until they are proven, too. Else that goes on beside the step.
        """
        if self._spec.is_synchronous or not len(self.engines):
            return self.is_settled
        if self._outlasts_step:
            return self._is_readable
        is_read = self._is_transferred and not self._num_behind
        is_read &= not self.engines.num_having(Status.READY, Status.REFITTING)
        return is_read and not self._attestation.needs_trainers

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
            and self._is_transferred_to(state)
            and (self._spec.updates_in_flight or not self._is_behind(state))
            and oldest_version <= state.version <= newest_version
        )

    def overdue(self) -> DeadlineExceeded | None:
        """Return the error of a replacement that did not come in time."""
        return self._recovery.overdue()

    # --- what the scheduler says -------------------------------------------------------------------------------------

    def begin(self, trainers: list[str], engines: list[str]) -> list[Action]:
        """Enter the processes of the run, whose transfers are planned, installed and connected."""
        self._trainers = trainers
        self.engines.fill(engines)
        if not self._spec.keeps_copy or self._outlasts_step:
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
        is_skipped = self.version >= 0 and not self._is_begun
        self.version = version
        self._has_update = has_update or (is_skipped and self._has_update)
        self._is_begun = self._is_transferred = False
        for name in self.engines:
            self.engines[name].num_failures = 0
        self._attestation.begin_version()
        if not self._spec.keeps_copy:
            self._make_readable()
            return []
        self._is_readable = False
        self._uncopied = {*self._trainers}
        return [
            Dispatch(
                member=rank,
                order=CopyWeights(
                    version=version,
                    with_digests=self._spec.is_verified,
                    **self._requests.open(rank, Phase.COPYING, self._spec.deadlines.refit),
                ),
            )
            for rank in self._trainers
        ]

    def withdraw(self) -> None:
        """Take note that trainers begin to step: the version can be read no longer, unless from a copy."""
        self._is_readable = self._outlasts_step

    def resume(self) -> None:
        """Take note that trainers have not stepped: the version can be read as before `withdraw`."""
        self._is_readable = True

    def stop(self) -> None:
        """Ask nothing more of engines: the run is being interrupted."""
        self._meshes.stop()
        self.engines.fill([])
        self._is_transferred = False

    # --- rules -------------------------------------------------------------------------------------------------------

    def run_rules(self, is_free: Callable[[str], bool]) -> list[Action]:
        """Do what can be done now for the version to reach engines, and to be attested.

        `is_free` tells whether an engine that holds an older version may take this one now.
        """
        if not len(self.engines):
            return []
        return [
            *self._meshes.connect(may_join=self._is_readable),
            *self._finish_record(),
            *self._publish(is_free),
            *self._begin_attesting(),
            *self._compare(),
        ]

    def _publish(self, is_free: Callable[[str], bool]) -> list[Action]:
        """Bring engines to the version that trainers hold: all together, or those that come later by themselves."""
        if not self._is_readable:
            return []
        if self._is_begun and not self.engines.num_having(Status.READY) and self._num_behind == 0:
            return []
        if not self._is_begun and self._spec.is_synchronous and self.engines.num_having(*COMING_BACK):
            return []  # nobody could go on without them
        able = [name for name in self.engines.having(Status.READY, Status.HOLDING) if self._may_take(name, is_free)]
        takers = self._meshes.who_get_it_whole(able, self.version)
        if not takers:
            return []
        now = self._requests.now
        if self._is_begun:
            self._record.deadline = max(self._record.deadline, now + self._spec.deadlines.refit)
            return self._refit(takers, everybody=False)
        self._is_begun = True
        quarantined = self._record.quarantined  # of the version before, and in no record
        self._record = RefitProgress(started_at=now, deadline=now + self._spec.deadlines.refit)
        self._record.quarantined = quarantined
        return self._refit(takers, everybody=len(takers) == len(self.engines))

    def _may_take(self, name: str, is_free: Callable[[str], bool]) -> bool:
        """Tell whether an engine can be refitted: it lacks the version, and what it holds is done with and attested."""
        engine = self.engines[name]
        if engine.status is Status.READY:
            return True
        return engine.version < self.version and engine.is_attested and is_free(name)

    def _refit(self, takers: list[str], *, everybody: bool) -> list[Action]:
        """Order engines to receive the version, and others to send what they need for it."""
        if not takers:
            return []
        senders = self.transfers.plan.senders
        if not everybody:
            meshes = [mesh for mesh in map(self.transfers.mesh_of, takers) if mesh is not None]
            senders = tuple(member for member in senders if any(member in mesh.members for mesh in meshes))
        actions: list[Action] = []
        for member in dict.fromkeys([*senders, *takers]):
            fields = self._requests.open(member, Phase.REFITTING, self._remaining_s())
            if member in takers:
                self._num_behind -= self._is_behind(self.engines[member])
                self.engines.move(self.engines[member], Status.REFITTING, version=self.version)
                self.engines[member].awaited = {fields["command_id"]}
            fields["deadline_s"] *= _SHARE_OF_TRANSFER
            only = () if everybody else tuple(takers)
            actions.append(Dispatch(member=member, order=Refit(version=self.version, only=only, **fields)))
        return actions

    def _begin_attesting(self) -> list[Action]:
        """Have digests taken of a version that has reached every engine it was begun with, beside what follows."""
        if not self._is_begun or self._is_transferred or self.engines.num_having(Status.REFITTING):
            return []
        if self._spec.is_synchronous and self.engines.num_having(Status.READY, *COMING_BACK):
            return []
        self._is_transferred = True
        self._record.transferred(self._requests.now)
        holders = [name for name in self.engines.having(Status.HOLDING) if self.engines[name].version == self.version]
        return self._attest(holders if self._spec.keeps_copy else [*self._trainers, *holders])

    def _compare(self) -> list[Action]:
        """Have the engines attested whose digests are all here, unless others are still computing theirs."""
        if not self._is_transferred or not self._attestation.may_compare:
            return []
        self._record.attested(self._requests.now)
        return self._attestation.compare(self._trainers, self.version, self._remaining_s(), has_update=self._has_update)

    def _finish_record(self) -> list[Action]:
        """Have it recorded where the version is and proven, once digests were compared for it and no other is open."""
        is_known = self._record.digest is not None and self._record.engines
        if not is_known or self.is_attesting or not self._is_everything_attested():
            return []
        now = self._requests.now
        done, self._record = self._record, RefitProgress(started_at=now, deadline=self._record.deadline)
        return [done.committed(self.version, self.transfers.plan, now)]

    # --- events ------------------------------------------------------------------------------------------------------

    def take_reply(self, member: str, reply: Reply) -> list[Action]:
        """Take a reply that answers a pending request of the weight plane or of its set-up."""
        self.transfers.take(member, reply)
        match reply:
            case Attested(digests=digests):
                self._attestation.take_digests(member, digests)
                return []
            case WeightsCopied(digests=digests):
                self._attestation.take_digests(member, digests)
                self._uncopied.discard(member)
                if not self._uncopied:
                    self._make_readable()
                return []
            case VersionCommitted():
                self._take_committed(reply)
                return []
            case _:
                pass
        engine = self.engines.get(member)
        if self._meshes.take_reply(reply.command_id) or engine is None or reply.command_id not in engine.awaited:
            return []
        engine.awaited.discard(reply.command_id)
        if engine.awaited:
            return []
        if engine.status is not Status.REFITTING:
            return self._recovery.go_on(engine)
        self.engines.move(engine, Status.HOLDING)
        return self._attest([engine.name]) if self._is_transferred else []

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
        times = self._record.num_failures_to_send
        times[member] = times.get(member, 0) + 1
        if times[member] > (MOST_FAILURES + self._spec.max_replacements) * len(self.engines):
            raise CommandFailed(member, failed.phase, failed.account)

    def take_loss(self, name: str, doing: str, why: str) -> list[Action]:
        """Ask for a replacement of an engine. Raises `ServiceLost` if it was replaced too often."""
        engine = self.engines[name]
        self._recovery.count_loss(engine, doing, why)
        self._requests.drop(name)
        self._forget(engine)
        if not self._record.seconds:  # what comes is a refit of this engine alone
            self._record = RefitProgress(started_at=self._requests.now, deadline=self._record.deadline)
        return self._recovery.replace(engine, why)

    def take_replacement(self, name: str) -> list[Action]:
        """Begin to bring a new process to where the others are."""
        return self._recovery.rebuild(name)

    def _take_committed(self, reply: VersionCommitted) -> None:
        attested, differing = self._attestation.take_compared(reply)
        self._record.engines += [engine.name for engine in attested]
        for engine in differing:
            what = f"it does not hold version {reply.version}: {reply.differing[engine.name]}"
            self._quarantine(engine, Phase.ATTESTING.value, what)
        self._record.digest = reply.digest

    @property
    def _outlasts_step(self) -> bool:
        """Whether engines can read a version while trainers step: there is a copy, and no trainer has to send it."""
        return self._spec.keeps_copy and not self.transfers.plan.senders

    def _make_readable(self) -> None:
        self._is_readable = True
        self._num_behind = self.engines.num_having(Status.HOLDING)

    # --- one engine --------------------------------------------------------------------------------------------------

    def _quarantine(self, engine: Engine, doing: str, why: str) -> None:
        """Have an engine refitted once more. Raises `CommandFailed` if it has had its second attempt."""
        self._recovery.count_failure(engine, doing, why)
        self._record.quarantined[engine.name] = why
        self._requests.drop(engine.name, Phase.REFITTING, Phase.ATTESTING)
        self._forget(engine)
        self._recovery.refit_again(engine)

    def _forget(self, engine: Engine) -> None:
        """Forget what an engine held: neither its digests count, nor what it made."""
        self._num_behind -= self._is_behind(engine)
        self._attestation.forget(engine.name)
        self.suspects.append(engine.name)

    def _is_everything_attested(self) -> bool:
        """Tell whether no engine holds what is not attested; in synchronous training, whether all hold the version."""
        expected = len(self.engines) if self._spec.is_synchronous else self.engines.num_having(Status.HOLDING)
        return self.engines.num_attested == expected

    def _is_behind(self, engine: Engine) -> bool:
        """Tell whether an engine can be brought to a newer version than the one it holds."""
        return self._is_readable and engine.status is Status.HOLDING and engine.version < self.version

    def _is_transferred_to(self, engine: Engine) -> bool:
        """Tell whether an engine may serve tokens; in synchronous training once the others hold the version as well."""
        if not self._spec.is_synchronous:
            return True
        return self._is_transferred or engine.version < self.version or not self._is_readable

    def _attest(self, members: list[str]) -> list[Action]:
        return self._attestation.order(members, self.version, self._remaining_s())

    def _remaining_s(self) -> float:
        """Return what is left of the refit's deadline; a little, if none is, so that the error is the order's own."""
        return max(self._record.deadline - self._requests.now, 1.0)
