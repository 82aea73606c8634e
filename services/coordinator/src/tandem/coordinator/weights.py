"""The weight plane as the coordinator sees it: who holds which version, and whose is attested. Pure, like the plan.

A refit is one transaction with one deadline::

    refit -> every engine holds the version -> attest -> commit -> record
                                               `-- beside the next phase; no sample is trained on before the end --'

An engine is quarantined when its part of a refit fails, or when its digests differ from the trainer's: it is refitted
once more, and if that fails too, so does the run. One that is lost is replaced, and the new process is brought to the
current version while trainers and other engines go on::

    absent -> building -> installing -> connecting -> ready -> refitting -> holding

Engines that pass weights on to each other are in one mesh. Those of them that are on their way back wait for each other
before it is connected anew and they are refitted together: what is torn is passed on by nobody.

`tandem.coordinator.plan` decides what samples are asked for; here it learns whose samples no longer count
(`take_suspects`) and which engines can generate again (`take_restored`).
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.common.errors import CommandFailed, DeadlineExceeded, ServiceLost
from tandem.common.messages import (
    Attest,
    Attested,
    BuildEngine,
    CommitVersion,
    Failed,
    PlannedMesh,
    Refit,
    Reply,
    VersionCommitted,
)
from tandem.coordinator.decisions import Action, Deadlines, Dispatch, Phase, RecordRefit, Replace, RunShape
from tandem.coordinator.engines import ON_THEIR_WAY, EngineState, RefitProgress, Status
from tandem.coordinator.orders import Orders
from tandem.coordinator.transfers import SERVICE, Transfers, by_part, processes_in

_MOST_FAILURES = 2
"""Attempts at one version that may fail before the run does."""
_SHARE_OF_TRANSFER = 0.8
"""Of a refit's deadline. The rest is for whoever gives up then to say so: that names the peer and the tensor."""
_Group = tuple[PlannedMesh | None, list[str]]
"""Engines that come back together, and the mesh that they are in; an engine that no weights stream to is alone."""


class WeightPlane:
    """Orders everything that concerns weights. Raises `ServiceError` where the run cannot go on."""

    def __init__(self, shape: RunShape, orders: Orders) -> None:
        self._deadlines: Deadlines = shape.deadlines
        self._transfers = Transfers(shape, orders)
        self._is_verified = shape.is_verified
        self._max_replacements = shape.max_replacements
        self._orders = orders
        self._trainers: list[str] = []
        self._connecting: dict[str, set[int]] = {}
        """Orders that must be answered before a mesh is connected again."""
        self.engines: dict[str, EngineState] = {}
        self.version = -1
        """What engines hold or are being brought to."""
        self._has_update = False
        self._is_still = False
        """Whether trainers hold `version` and will not step meanwhile, so that it can be read."""
        self._is_attesting = False
        self._digests: dict[str, dict[str, bytes]] = {}
        """Of each process, by part."""
        self._unattested: set[str] = set()
        """Members whose digests were asked for and have not come."""
        self._committing: tuple[str, ...] = ()
        self._record = RefitProgress()
        self._suspects: list[str] = []
        self._restored: list[str] = []

    # --- what the plan asks ------------------------------------------------------------------------------------------

    @property
    def is_recovering(self) -> bool:
        """Whether an engine is on its way back to where the others are."""
        return any(
            state.status not in (Status.READY, Status.HOLDING) or (state.status is Status.READY and self._is_still)
            for state in self.engines.values()
        )

    def take_suspects(self) -> list[str]:
        """Return engines whose samples of this version do not count, each once."""
        suspects, self._suspects = self._suspects, []
        return suspects

    def take_restored(self) -> list[str]:
        """Return engines that hold the version again, each once."""
        restored, self._restored = self._restored, []
        return restored

    def overdue(self) -> DeadlineExceeded | None:
        """Return the error of a replacement that did not come in time."""
        for name, state in self.engines.items():
            if state.status is Status.ABSENT and self._orders.now > state.replace_by:
                what = f"no process has taken its place within {self._deadlines.join:g} s"
                return DeadlineExceeded(name, state.status.value, what)
        return None

    def stop(self) -> None:
        """Nothing more will be asked of engines: the run is being interrupted."""
        for mesh in [*self._connecting]:
            self._stop_connecting(mesh)
        self.engines = {}
        self._is_attesting = False

    # --- set-up ------------------------------------------------------------------------------------------------------

    def plan_transfers(self, trainers: list[str], engines: list[str]) -> list[Action]:
        """Have all transfers planned from the layouts that trainers and engines sent."""
        self._trainers = trainers
        self.engines = {engine: EngineState() for engine in engines}
        return self._transfers.order_plan(trainers, engines)

    def install(self) -> list[Action]:
        """Have everybody's program bound."""
        return self._transfers.order_install()

    def connect(self) -> list[Action]:
        """Have all meshes connected."""
        return [action for mesh in self._transfers.plan.meshes for action in self._transfers.order_connect(mesh)]

    # --- the transaction ---------------------------------------------------------------------------------------------

    def refit(self, version: int, *, has_update: bool) -> list[Action]:
        """Bring every engine that is ready to `version`, which trainers hold from now on until `release`."""
        self.version = version
        self._has_update = has_update
        self._is_still = True
        self._digests = {}
        self._record = RefitProgress(started_at=self._orders.now, deadline=self._orders.now + self._deadlines.refit)
        ready = [name for name, state in self.engines.items() if state.status is Status.READY]
        for name in ready:
            self.engines[name].num_failures = 0
            self.engines[name].status = Status.REFITTING
        assert len(ready) == len(self.engines), "nobody is on the way back between a training step and its refit"
        return self._refit_orders([*self._transfers.plan.senders, *ready], only=())

    def attest(self) -> list[Action]:
        """Have the version attested that every engine now holds, beside whatever the plan does next."""
        if not self.engines:
            return []
        self._is_attesting = True
        self._record.transferred(self._orders.now)
        return self._attest([*self._trainers, *self.engines])

    def release(self) -> None:
        """Trainers are about to step: the version is no longer there to be read."""
        self._is_still = self._is_attesting = False
        for state in self.engines.values():
            state.is_attested = False
            if state.status is Status.HOLDING:
                state.status = Status.READY

    # --- events ------------------------------------------------------------------------------------------------------

    def take_reply(self, member: str, reply: Reply) -> list[Action]:
        """Take a reply that answers an outstanding order of the plane or of its set-up."""
        self._transfers.take(member, reply)
        match reply:
            case Attested(digests=digests):
                self._digests[member] = by_part(member, digests)
                self._unattested.discard(member)
                return self._commit()
            case VersionCommitted():
                return self._take_committed(reply)
            case _:
                pass
        for mesh, awaited in self._connecting.items():
            if reply.command_id in awaited:
                awaited.discard(reply.command_id)
                return [] if awaited else self._connected(mesh)
        for name, state in self.engines.items():
            if reply.command_id in state.awaited:
                state.awaited.discard(reply.command_id)
                return [] if state.awaited else [*self._go_on(name, state), *self._bring_back()]
        return []

    def take_failure(self, member: str, failed: Failed, phase: Phase) -> list[Action]:
        """Take the failure of a member's part in a refit, or of an engine's in its attestation: `phase` says which.

        Quarantines the engine, or raises `CommandFailed`.
        """
        if not self.engines:
            return []
        state = self.engines.get(member)
        # Of a refit, an engine that only passes weights on fails like any sender.
        if state is not None and (phase is Phase.ATTESTING or failed.command_id in state.awaited):
            self._quarantine(member, state, failed.phase, failed.account)
            return self._bring_back()
        # A sender fails when its receiver does, which then says so itself or is lost; what matters is who holds what.
        times = self._record.num_failures_to_send
        times[member] = times.get(member, 0) + 1
        if times[member] > (_MOST_FAILURES + self._max_replacements) * len(self.engines):
            raise CommandFailed(member, failed.phase, failed.account)
        return []

    def take_loss(self, engine: str, doing: str, why: str) -> list[Action]:
        """Ask for a replacement of an engine. Raises `ServiceLost` if it was replaced too often."""
        state = self.engines[engine]
        state.num_losses += 1
        if state.num_losses > self._max_replacements:
            times = f"; it was replaced {self._max_replacements} times before" if self._max_replacements else ""
            raise ServiceLost(engine, doing, why + times)
        self._orders.drop(engine)
        self._digests.pop(engine, None)
        self._unattested.discard(engine)
        self._suspects.append(engine)
        if not self._record.seconds:  # what comes is a refit of this engine alone
            self._record = RefitProgress(started_at=self._orders.now, deadline=self._record.deadline)
        state.status, state.awaited, state.is_attested = Status.ABSENT, set(), False
        state.replace_by = self._orders.now + self._deadlines.join
        mesh, _ = self._group(engine)
        if mesh is not None:
            self._stop_connecting(mesh.name)
        return [Replace(member=engine, why=why), *self._commit()]

    def take_replacement(self, engine: str) -> list[Action]:
        """Begin to bring a new process to where the others are."""
        state = self.engines[engine]
        state.status = Status.BUILDING
        order = BuildEngine(**self._orders.promise(engine, Phase.BUILDING, self._deadlines.build))
        return self._await(state, [Dispatch(member=engine, order=order)])

    # --- bringing one engine to the version --------------------------------------------------------------------------

    def _go_on(self, name: str, state: EngineState) -> list[Action]:
        """Take an engine whose orders were all answered one status further."""
        match state.status:
            case Status.BUILDING:
                state.status = Status.INSTALLING
                return self._await(state, self._transfers.order_install([name]))
            case Status.INSTALLING:
                state.status = Status.CONNECTING
                return []
            case Status.REFITTING:
                state.status = Status.HOLDING
                if not self._is_attesting:
                    return []
                self._restored.append(name)
                return self._attest([name])
            case other:
                raise AssertionError(f"{name} is {other.value} and waits for no order")

    def _bring_back(self) -> list[Action]:
        """Connect engines anew that have all they need but a mesh, once those that they share it with have, too."""
        actions: list[Action] = []
        for mesh, engines in self._groups():
            statuses = {self.engines[name].status for name in engines}
            if Status.CONNECTING not in statuses or statuses & ON_THEIR_WAY:
                continue
            if mesh is None:
                actions += self._make_ready(mesh, engines)
            elif mesh.name not in self._connecting:
                orders = self._transfers.order_connect(mesh)
                self._connecting[mesh.name] = {action.order.command_id for action in orders}
                actions += orders
        return actions

    def _stop_connecting(self, mesh: str) -> None:
        """Wait for a mesh no longer; its members do so in vain, until they are told of the next attempt."""
        for command_id in self._connecting.pop(mesh, ()):
            self._orders.outstanding.pop(command_id, None)

    def _connected(self, name: str) -> list[Action]:
        del self._connecting[name]
        mesh, engines = next(group for group in self._groups() if group[0] is not None and group[0].name == name)
        waiting = [engine for engine in engines if self.engines[engine].status is Status.CONNECTING]
        return self._make_ready(mesh, waiting)

    def _make_ready(self, mesh: PlannedMesh | None, engines: list[str]) -> list[Action]:
        """Refit engines together; while trainers step, the refit after the step takes them along."""
        for name in engines:
            self.engines[name].status = Status.REFITTING if self._is_still else Status.READY
        if not self._is_still:
            return []
        self._record.deadline = max(self._record.deadline, self._orders.now + self._deadlines.refit)
        senders = [member for member in self._transfers.plan.senders if mesh is not None and member in mesh.members]
        return self._refit_orders([*senders, *engines], only=tuple(engines))

    def _group(self, engine: str) -> _Group:
        mesh = self._transfers.mesh_of(engine)
        return mesh, [engine] if mesh is None else [name for name in processes_in(mesh) if name in self.engines]

    def _groups(self) -> list[_Group]:
        """Return every engine in one group: it receives over one mesh at most, and passes on over the same."""
        groups = [self._group(engine) for engine in self.engines]
        return [group for engine, group in zip(self.engines, groups, strict=True) if group[1][0] == engine]

    def _refit_orders(self, members: Iterable[str], only: tuple[str, ...]) -> list[Action]:
        """Order engines to receive, all or `only` these, and others to send what they need for it."""
        actions: list[Action] = []
        for member in dict.fromkeys(members):
            promise = self._orders.promise(member, Phase.REFITTING, self._remaining_s())
            if member in self.engines and (not only or member in only):
                self.engines[member].awaited = {promise["command_id"]}
            promise["deadline_s"] *= _SHARE_OF_TRANSFER
            actions.append(Dispatch(member=member, order=Refit(version=self.version, only=only, **promise)))
        return actions

    def _quarantine(self, name: str, state: EngineState, doing: str, why: str) -> None:
        """Have an engine refitted once more. Raises `CommandFailed` if it has had its second attempt."""
        state.num_failures += 1
        if state.num_failures >= _MOST_FAILURES:
            raise CommandFailed(name, doing, why)
        self._record.quarantined[name] = why
        self._suspects.append(name)
        self._orders.drop(name, Phase.REFITTING, Phase.ATTESTING)
        self._unattested.discard(name)
        state.status, state.awaited, state.is_attested = Status.CONNECTING, set(), False

    # --- attestation -------------------------------------------------------------------------------------------------

    def _attest(self, members: list[str]) -> list[Action]:
        if not self._is_verified:
            return self._commit()
        self._unattested.update(members)
        return [
            Dispatch(
                member=member,
                order=Attest(
                    version=self.version, **self._orders.promise(member, Phase.ATTESTING, self._remaining_s())
                ),
            )
            for member in members
        ]

    def _commit(self) -> list[Action]:
        """Have the engines attested whose digests are all here, unless others are still computing theirs."""
        waiting = [
            name for name, state in self.engines.items() if state.status is Status.HOLDING and not state.is_attested
        ]
        if not self._is_attesting or self._unattested or self._committing or not waiting:
            return []
        self._committing = tuple(waiting)
        self._record.attested(self._orders.now)
        known = [self._digests[name] for name in [*self._trainers, *waiting]] if self._is_verified else []
        order = CommitVersion(
            version=self.version,
            digests={part: digests for process in known for part, digests in process.items()},
            has_update=self._has_update,
            **self._orders.promise(SERVICE, Phase.ATTESTING, self._remaining_s()),
        )
        return [Dispatch(member=SERVICE, order=order)]

    def _take_committed(self, reply: VersionCommitted) -> list[Action]:
        committed, self._committing = self._committing, ()
        for name in committed:
            state = self.engines[name]
            if state.status is not Status.HOLDING:
                continue  # lost meanwhile
            if name in reply.differing:
                what = f"it does not hold version {reply.version}: {reply.differing[name]}"
                self._quarantine(name, state, Phase.ATTESTING.value, what)
            else:
                state.is_attested = True
                self._record.engines.append(name)
        actions = self._bring_back()
        if all(state.is_attested for state in self.engines.values()):
            actions.append(self._finish_record(reply.digest))
        return [*actions, *self._commit()]

    def _finish_record(self, digest: int) -> RecordRefit:
        done, self._record = self._record, RefitProgress(started_at=self._orders.now, deadline=self._record.deadline)
        done.committed(self._orders.now)
        return RecordRefit(
            version=self.version,
            engines=tuple(sorted(done.engines)),
            seconds=done.seconds,
            digest=digest,
            predicted_s=self._transfers.plan.predicted_s,
            bound_s=self._transfers.plan.bound_s,
            quarantined=done.quarantined,
        )

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    def _await(self, state: EngineState, actions: list[Action]) -> list[Action]:
        """Have an engine wait for the answers to these orders."""
        state.awaited = {action.order.command_id for action in actions if isinstance(action, Dispatch)}
        return actions

    def _remaining_s(self) -> float:
        """Return what is left of the refit's deadline; a little, if none is, so that the error is the order's own."""
        return max(self._record.deadline - self._orders.now, 1.0)
