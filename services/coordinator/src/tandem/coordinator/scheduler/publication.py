"""Publish weights: bring a version from the trainers to each engine, and prove that it is there.

One publication is a transaction of every engine, with one deadline::

    refit ─▶ the engine holds the version ─▶ digests ─▶ compared: attested ─▶ recorded
                                             `── beside generation; no sample is trained on before the end ──┘

An engine is quarantined when its part of a refit fails, or when its digests differ from the trainers': it is refitted
once more, and if that fails too, so does the run. One that is lost is replaced, and the new process is built, gets its
transfer program, and is brought to the current version while trainers and other engines go on.

Where trainers keep a copy for engines to read (`RunSpec.keeps_copy`), a version begins with that copy and with the
digests of what was copied. Trainers go on at once, and the copy is read, by engines that come late too, until the next
one is ordered: when nobody reads it and all that was read is proven. A version that no engine had time for is skipped.

Engines that pass weights on to each other are in one mesh. Those of them that come back wait for each other before it
is connected anew and they are refitted together: what is torn is passed on by nobody.

`Publication` has the rules that fire here (`run_rules`), and takes what concerns weights of what happens. Whose samples
no longer count it says in `suspects`. It raises `ServiceError` where the run cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.common.errors import CommandFailed, DeadlineExceeded, ServiceLost
from tandem.common.messages import (
    Attest,
    Attested,
    BuildEngine,
    CommitVersion,
    CopyWeights,
    Failed,
    PlannedMesh,
    Refit,
    Reply,
    VersionCommitted,
    WeightsCopied,
)
from tandem.coordinator.scheduler.engines import COMING_BACK, Engine, EngineTable, Status
from tandem.coordinator.scheduler.events import Action, Dispatch, RecordRefit, Replace, Say
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.transfers import SERVICE, Transfers, by_part, processes_in

_MOST_FAILURES = 2
"""Attempts at one version that may fail before the run does."""
_SHARE_OF_TRANSFER = 0.8
"""Of a refit's deadline. The rest is for whoever gives up then to say so: that names the peer and the tensor."""
_NOT_TO_BE_CONNECTED = {Status.ABSENT, Status.BUILDING, Status.INSTALLING, Status.REFITTING}
"""A mesh with such an engine is not connected: it is not there, or is busy with what is torn already."""


class RefitProgress:
    """What a publication has been so far."""

    def __init__(self, *, started_at: float = 0.0, deadline: float = 0.0) -> None:
        self.deadline = deadline
        self.seconds: dict[str, float] = {}
        self.engines: list[str] = []
        self.quarantined: dict[str, str] = {}
        self.digest: int | None = None
        """Of the version, once it is known."""
        self.num_failures_to_send: dict[str, int] = {}
        self._since = started_at

    def transferred(self, now: float) -> None:
        """Every engine holds the version."""
        self._note("transfer", now)

    def attested(self, now: float) -> None:
        """All digests are here."""
        self._note("attest" if "transfer" in self.seconds else "transfer", now)

    def committed(self, now: float) -> None:
        """The refit service has compared them."""
        self._note("commit", now)

    def _note(self, phase: str, now: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


class Publication:
    """The newest version of the trainers' weights, on its way to engines."""

    def __init__(self, spec: RunSpec, requests: PendingRequests) -> None:
        self._spec = spec
        self._deadlines = spec.deadlines
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
        self._connecting: dict[str, set[int]] = {}
        """Requests that must be answered before a mesh is connected again."""
        self._digests: dict[str, dict[str, bytes]] = {}
        """Of each process, by worker shard; of what it holds."""
        self._unattested: set[str] = set()
        """Members whose digests were asked for and have not come."""
        self._unattested_trainers: set[str] = set()
        """Those of them whose weights must not change before."""
        self._committing: list[str] | None = None
        """Engines whose digests the refit service compares; None while it compares none."""
        self._record = RefitProgress()

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
        if not len(self.engines):
            return False
        is_asked = bool(self._unattested) or self._committing is not None
        return is_asked or self.engines.num_attested != self.engines.num_having(Status.HOLDING)

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
        return is_read and not self._unattested_trainers

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
        for name in self.engines.having(Status.ABSENT):
            if self._requests.now > self.engines[name].replace_by:
                what = f"no process has taken its place within {self._deadlines.join:g} s"
                return DeadlineExceeded(name, Status.ABSENT.value, what)
        return None

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
        self._digests = {}
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
                    **self._requests.open(rank, Phase.COPYING, self._deadlines.refit),
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
        for mesh in [*self._connecting]:
            self._stop_connecting(mesh)
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
            *self._connect_meshes(),
            *self._finish_record(),
            *self._publish(is_free),
            *self._begin_attesting(),
            *self._commit(),
        ]

    def _connect_meshes(self) -> list[Action]:
        """Connect engines anew that have all they need but a mesh, once those that they share it with have, too."""
        actions: list[Action] = []
        for name in self.engines.having(Status.CONNECTING):
            mesh = self.transfers.mesh_of(name)
            if mesh is None:
                self.engines.move(self.engines[name], Status.READY)
                continue
            if mesh.name in self._connecting or not self._is_readable:  # who is in a step joins nothing before its end
                continue
            if not {self.engines[other].status for other in self._engines_in(mesh)} & _NOT_TO_BE_CONNECTED:
                orders = self.transfers.order_connect(mesh)
                self._connecting[mesh.name] = {action.order.command_id for action in orders}
                actions += orders
        return actions

    def _publish(self, is_free: Callable[[str], bool]) -> list[Action]:
        """Bring engines to the version that trainers hold: all together, or those that come later by themselves."""
        if not self._is_readable:
            return []
        if self._is_begun and not self.engines.num_having(Status.READY) and self._num_behind == 0:
            return []
        if not self._is_begun and self._spec.is_synchronous and self.engines.num_having(*COMING_BACK):
            return []  # nobody could go on without them
        able = [name for name in self.engines.having(Status.READY, Status.HOLDING) if self._may_take(name, is_free)]
        takers = self._who_get_it_whole(able)
        if not takers:
            return []
        now = self._requests.now
        if self._is_begun:
            self._record.deadline = max(self._record.deadline, now + self._deadlines.refit)
            return self._refit(takers, everybody=False)
        self._is_begun = True
        quarantined = self._record.quarantined  # of the version before, and in no record
        self._record = RefitProgress(started_at=now, deadline=now + self._deadlines.refit)
        self._record.quarantined = quarantined
        return self._refit(takers, everybody=len(takers) == len(self.engines))

    def _may_take(self, name: str, is_free: Callable[[str], bool]) -> bool:
        """Tell whether an engine can be refitted: it lacks the version, and what it holds is done with and attested."""
        engine = self.engines[name]
        if engine.status is Status.READY:
            return True
        return engine.version < self.version and engine.is_attested and is_free(name)

    def _who_get_it_whole(self, able: list[str]) -> list[str]:
        """Leave out engines to which another of their mesh would pass on what is older, or torn, or nothing."""
        if not self.transfers.plan.meshes:
            return able
        takers, chosen = [], set(able)
        for name in able:
            mesh = self.transfers.mesh_of(name)
            others = self._engines_in(mesh) if mesh is not None else []
            if all(other in chosen or self._holds_newest(self.engines[other]) for other in others):
                takers.append(name)
        return takers

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

    def _commit(self) -> list[Action]:
        """Have the engines attested whose digests are all here, unless others are still computing theirs."""
        if not self._is_transferred or self._unattested or self._committing is not None:
            return []
        if self.engines.num_attested == self.engines.num_having(Status.HOLDING):
            return []
        waiting = [name for name in self.engines.having(Status.HOLDING) if not self.engines[name].is_attested]
        self._committing = waiting
        self._record.attested(self._requests.now)
        known = [self._digests[name] for name in [*self._trainers, *waiting]] if self._spec.is_verified else []
        order = CommitVersion(
            version=self.version,
            digests={part: digests for process in known for part, digests in process.items()},
            has_update=self._has_update,
            **self._requests.open(SERVICE, Phase.ATTESTING, self._remaining_s()),
        )
        return [Dispatch(member=SERVICE, order=order)]

    # --- events ------------------------------------------------------------------------------------------------------

    def take_reply(self, member: str, reply: Reply) -> list[Action]:
        """Take a reply that answers a pending request of the weight plane or of its set-up."""
        self.transfers.take(member, reply)
        match reply:
            case Attested(digests=digests):
                self._digests[member] = by_part(member, digests)
                self._unattested.discard(member)
                self._unattested_trainers.discard(member)
                return []
            case WeightsCopied(digests=digests):
                self._digests[member] = by_part(member, digests)
                self._uncopied.discard(member)
                if not self._uncopied:
                    self._make_readable()
                return []
            case VersionCommitted():
                self._take_committed(reply)
                return []
            case _:
                pass
        for mesh, awaited in self._connecting.items():
            if reply.command_id in awaited:
                awaited.discard(reply.command_id)
                if not awaited:
                    self._mesh_connected(mesh)
                return []
        engine = self.engines.get(member)
        if engine is None or reply.command_id not in engine.awaited:
            return []
        engine.awaited.discard(reply.command_id)
        return [] if engine.awaited else self._go_on(engine)

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
        if times[member] > (_MOST_FAILURES + self._spec.max_replacements) * len(self.engines):
            raise CommandFailed(member, failed.phase, failed.account)

    def take_loss(self, name: str, doing: str, why: str) -> list[Action]:
        """Ask for a replacement of an engine. Raises `ServiceLost` if it was replaced too often."""
        engine, most = self.engines[name], self._spec.max_replacements
        engine.num_losses += 1
        if engine.num_losses > most:
            times = f"; it was replaced {most} times before" if most else ""
            raise ServiceLost(name, doing, why + times)
        self._requests.drop(name)
        self._num_behind -= self._is_behind(engine)
        self._forget_digests(engine)
        if not self._record.seconds:  # what comes is a refit of this engine alone
            self._record = RefitProgress(started_at=self._requests.now, deadline=self._record.deadline)
        self.engines.move(engine, Status.ABSENT, version=-1)
        engine.awaited = set()
        engine.replace_by = self._requests.now + self._deadlines.join
        mesh = self.transfers.mesh_of(name)
        if mesh is not None:
            self._stop_connecting(mesh.name)
        return [Replace(member=name, why=why)]

    def take_replacement(self, name: str) -> list[Action]:
        """Begin to bring a new process to where the others are."""
        engine = self.engines[name]
        self.engines.move(engine, Status.BUILDING)
        fields = self._requests.open(name, Phase.BUILDING, self._deadlines.build)
        spec = self._spec
        order = BuildEngine(samples_folder=spec.samples_folder, reward_server=spec.reward_server, **fields)
        return self._await(engine, [Dispatch(member=name, order=order)])

    def _go_on(self, engine: Engine) -> list[Action]:
        """Take an engine whose requests were all answered one status further."""
        match engine.status:
            case Status.BUILDING:
                self.engines.move(engine, Status.INSTALLING)
                return self._await(engine, self.transfers.order_install([engine.name]))
            case Status.INSTALLING:
                self.engines.move(engine, Status.CONNECTING)
                return []
            case Status.REFITTING:
                self.engines.move(engine, Status.HOLDING)
                return self._attest([engine.name]) if self._is_transferred else []
            case other:
                raise AssertionError(f"{engine.name} is {other.value} and waits for no answer")

    def _take_committed(self, reply: VersionCommitted) -> None:
        committed, self._committing = self._committing or [], None
        for engine in [self.engines[name] for name in committed if name in self.engines]:
            name = engine.name
            if name in reply.differing:
                what = f"it does not hold version {reply.version}: {reply.differing[name]}"
                self._quarantine(engine, Phase.ATTESTING.value, what)
            else:
                self.engines.attest(engine, is_attested=True)
                self._record.engines.append(name)
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
        engine.num_failures += 1
        if engine.num_failures >= _MOST_FAILURES:
            raise CommandFailed(engine.name, doing, why)
        self._record.quarantined[engine.name] = why
        self._requests.drop(engine.name, Phase.REFITTING, Phase.ATTESTING)
        self._num_behind -= self._is_behind(engine)
        self._forget_digests(engine)
        self.engines.move(engine, Status.CONNECTING, version=-1)
        engine.awaited = set()

    def _forget_digests(self, engine: Engine) -> None:
        """Forget what an engine held: neither its digests count, nor what it made."""
        self._digests.pop(engine.name, None)
        self._unattested.discard(engine.name)
        if self._committing is not None and engine.name in self._committing:
            self._committing.remove(engine.name)
        self.suspects.append(engine.name)

    def _is_everything_attested(self) -> bool:
        """Tell whether no engine holds what is not attested; in synchronous training, whether all hold the version."""
        expected = len(self.engines) if self._spec.is_synchronous else self.engines.num_having(Status.HOLDING)
        return self.engines.num_attested == expected

    def _is_behind(self, engine: Engine) -> bool:
        """Tell whether an engine can be brought to a newer version than the one it holds."""
        return self._is_readable and engine.status is Status.HOLDING and engine.version < self.version

    def _holds_newest(self, engine: Engine) -> bool:
        return engine.status is Status.HOLDING and engine.version == self.version

    def _is_transferred_to(self, engine: Engine) -> bool:
        """Tell whether an engine may serve tokens; in synchronous training once the others hold the version as well."""
        if not self._spec.is_synchronous:
            return True
        return self._is_transferred or engine.version < self.version or not self._is_readable

    def _mesh_connected(self, name: str) -> None:
        del self._connecting[name]
        mesh = next(mesh for mesh in self.transfers.plan.meshes if mesh.name == name)
        for engine in self._engines_in(mesh):
            if self.engines[engine].status is Status.CONNECTING:
                self.engines.move(self.engines[engine], Status.READY)

    def _stop_connecting(self, mesh: str) -> None:
        """Wait for a mesh no longer; its members do so in vain, until they are told of the next attempt."""
        for command_id in self._connecting.pop(mesh, ()):
            self._requests.close(command_id)

    def _engines_in(self, mesh: PlannedMesh) -> list[str]:
        return [name for name in processes_in(mesh) if name in self.engines]

    def _attest(self, members: list[str]) -> list[Action]:
        if not self._spec.is_verified:
            return []
        self._unattested.update(members)
        self._unattested_trainers.update(member for member in members if member not in self.engines)
        return [
            Dispatch(
                member=member,
                order=Attest(version=self.version, **self._requests.open(member, Phase.ATTESTING, self._remaining_s())),
            )
            for member in members
        ]

    def _finish_record(self) -> list[Action]:
        """Have it recorded where the version is and proven, once digests were compared for it and no other is open."""
        digest = self._record.digest
        if digest is None or not self._record.engines or self.is_attesting or not self._is_everything_attested():
            return []
        now = self._requests.now
        done, self._record = self._record, RefitProgress(started_at=now, deadline=self._record.deadline)
        done.committed(now)
        return [
            RecordRefit(
                version=self.version,
                engines=tuple(sorted(set(done.engines))),
                seconds=done.seconds,
                digest=digest,
                predicted_s=self.transfers.plan.predicted_s,
                bound_s=self.transfers.plan.bound_s,
                quarantined=done.quarantined,
            )
        ]

    def _await(self, engine: Engine, actions: list[Action]) -> list[Action]:
        """Have an engine wait for the answers to these orders."""
        engine.awaited = {action.order.command_id for action in actions if isinstance(action, Dispatch)}
        return actions

    def _remaining_s(self) -> float:
        """Return what is left of the refit's deadline; a little, if none is, so that the error is the order's own."""
        return max(self._record.deadline - self._requests.now, 1.0)
