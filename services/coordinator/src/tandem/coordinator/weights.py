"""The weight plane as the coordinator sees it: who holds which version, and whose is attested. Pure, like the plan.

A refit is one transaction with one deadline::

    refit -> every engine holds the version -> attest -> commit -> record
                                               `-- beside the next phase; no sample is trained on before the end --'

An engine is quarantined when its part of a refit fails, or when its digests differ from the trainer's: it is refitted
once more, and if that fails too, so does the run. One that is lost is replaced, and the new process is brought to the
current version while trainers and other engines go on::

    absent -> building -> installing -> connecting -> ready -> refitting -> holding

`tandem.coordinator.plan` decides what samples are asked for; here it learns whose samples no longer count
(`take_suspects`) and which engines can generate again (`take_restored`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from tandem.common.errors import CommandFailed, DeadlineExceeded, ServiceLost
from tandem.common.messages import (
    Attest,
    Attested,
    BuildEngine,
    CommitVersion,
    ConnectMesh,
    EngineBuilt,
    Failed,
    InstallProgram,
    PlanTransfers,
    Refit,
    RendezvousOpened,
    Reply,
    TrainerBuilt,
    TransfersPlanned,
    VersionCommitted,
)
from tandem.coordinator.decisions import Action, Deadlines, Dispatch, Phase, RecordRefit, Replace, RunShape
from tandem.coordinator.orders import Orders

_SERVICE = "refit-0"
_MOST_FAILURES = 2
"""Attempts at one version that may fail before the run does."""


class Status(enum.Enum):
    """How far an engine is from serving tokens."""

    ABSENT = "waiting for a replacement"
    BUILDING = "building"
    INSTALLING = "installing its transfer program"
    CONNECTING = "connecting meshes"
    READY = "ready for a version"
    REFITTING = "refitting"
    HOLDING = "holding the version"


class EngineState:
    """What is known of one engine."""

    def __init__(self) -> None:
        self.status = Status.READY
        self.awaited: set[int] = set()
        """Orders that must be answered before its status changes."""
        self.is_attested = False
        self.num_failures = 0
        """To bring it to the current version."""
        self.num_losses = 0
        self.replace_by = 0.0
        """When it must have been replaced; while it is absent."""


class WeightPlane:
    """Orders everything that concerns weights. Raises `ServiceError` where the run cannot go on."""

    def __init__(self, shape: RunShape, orders: Orders) -> None:
        self._deadlines: Deadlines = shape.deadlines
        self._allow_alias = shape.allow_alias
        self._is_verified = shape.is_verified
        self._max_replacements = shape.max_replacements
        self._orders = orders
        self._rendezvous = ("", 0)
        self._trainers: list[str] = []
        self._layouts: dict[str, bytes] = {}
        self._planned: TransfersPlanned | None = None
        self._epochs: dict[str, int] = {}
        """How often each mesh was connected."""
        self.engines: dict[str, EngineState] = {}
        self.version = -1
        """What engines hold or are being brought to."""
        self._has_update = False
        self._is_still = False
        """Whether trainers hold `version` and will not step meanwhile, so that it can be read."""
        self._is_attesting = False
        self._digests: dict[str, bytes] = {}
        self._unattested: set[str] = set()
        """Members whose digests were asked for and have not come."""
        self._committing: tuple[str, ...] = ()
        self._record = _Record()
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
        self.engines = {}
        self._is_attesting = False

    # --- set-up ------------------------------------------------------------------------------------------------------

    def plan_transfers(self, trainers: list[str], engines: list[str]) -> list[Action]:
        """Have all transfers planned from the layouts that trainers and engines sent."""
        self._trainers = trainers
        self.engines = {engine: EngineState() for engine in engines}
        order = PlanTransfers(
            sources={name: self._layouts[name] for name in trainers},
            destinations={name: self._layouts[name] for name in engines},
            allow_alias=self._allow_alias,
            **self._orders.promise(_SERVICE, Phase.PLANNING, self._deadlines.build),
        )
        return [Dispatch(member=_SERVICE, order=order)]

    def install(self, members: Iterable[str] | None = None) -> list[Action]:
        """Have programs bound: everybody's, or these members'."""
        programs = self._plan.programs
        return [
            Dispatch(
                member=member,
                order=InstallProgram(
                    program=programs[member],
                    **self._orders.promise(member, Phase.INSTALLING, self._deadlines.build),
                ),
            )
            for member in (programs if members is None else members)
        ]

    def connect(self, engine: str | None = None) -> list[Action]:
        """Have meshes connected: all, or those that `engine` is in."""
        actions: list[Action] = []
        for mesh in self._plan.meshes:
            if engine is not None and engine not in mesh.members:
                continue
            epoch = self._epochs[mesh.name] = self._epochs.get(mesh.name, -1) + 1
            host, port = self._rendezvous
            for member in mesh.members:
                order = ConnectMesh(
                    mesh=mesh.name,
                    members=mesh.members,
                    epoch=epoch,
                    rendezvous_host=host,
                    rendezvous_port=port,
                    **self._orders.promise(member, Phase.CONNECTING, self._deadlines.build),
                )
                actions.append(Dispatch(member=member, order=order))
        return actions

    # --- the transaction ---------------------------------------------------------------------------------------------

    def refit(self, version: int, *, has_update: bool) -> list[Action]:
        """Bring every engine that is ready to `version`, which trainers hold from now on until `release`."""
        self.version = version
        self._has_update = has_update
        self._is_still = True
        self._digests = {}
        self._record = _Record(started_at=self._orders.now, deadline=self._orders.now + self._deadlines.refit)
        ready = [name for name, state in self.engines.items() if state.status is Status.READY]
        for name in ready:
            self.engines[name].num_failures = 0
            self.engines[name].status = Status.REFITTING
        return self._refit_orders(ready, only=() if len(ready) == len(self.engines) else tuple(ready))

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
        match reply:
            case RendezvousOpened(host=host, port=port):
                self._rendezvous = (host, port)
            case TrainerBuilt(layout=layout):
                self._layouts[member] = layout
            case EngineBuilt(layout=layout):
                self._take_layout(member, layout)
            case TransfersPlanned():
                self._planned = reply
            case Attested(digests=digests):
                self._digests[member] = digests
                self._unattested.discard(member)
                return self._commit()
            case VersionCommitted():
                return self._take_committed(reply)
            case _:
                pass
        for name, state in self.engines.items():
            if reply.command_id in state.awaited:
                state.awaited.discard(reply.command_id)
                if not state.awaited:
                    return self._go_on(name, state)
        return []

    def take_failure(self, member: str, failed: Failed) -> list[Action]:
        """Take the failure of a member's part in a refit, or of an engine's in its attestation.

        Quarantines the engine, or raises `CommandFailed`.
        """
        if not self.engines:
            return []
        state = self.engines.get(member)
        what = failed.error if failed.expected else f"{failed.error}\n{failed.traceback}"
        if state is not None:
            return self._quarantine(member, state, failed.phase, what)
        # A sender fails when its receiver does, which then says so itself or is lost; what matters is who holds what.
        self._record.num_sender_failures += 1
        if self._record.num_sender_failures > _MOST_FAILURES * len(self.engines):
            raise CommandFailed(member, failed.phase, what)
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
            self._record = _Record(started_at=self._orders.now, deadline=self._record.deadline)
        state.status, state.awaited, state.is_attested = Status.ABSENT, set(), False
        state.replace_by = self._orders.now + self._deadlines.join
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
                return self._await(state, self.install([name]))
            case Status.INSTALLING:
                return self._reconnect(name, state)
            case Status.CONNECTING:
                return self._make_ready(name, state)
            case Status.REFITTING:
                state.status = Status.HOLDING
                if not self._is_attesting:
                    return []
                self._restored.append(name)
                return self._attest([name])
            case other:
                raise AssertionError(f"{name} is {other.value} and waits for no order")

    def _reconnect(self, name: str, state: EngineState) -> list[Action]:
        state.status = Status.CONNECTING
        connect = self.connect(name)
        return self._await(state, connect) if connect else self._make_ready(name, state)

    def _make_ready(self, name: str, state: EngineState) -> list[Action]:
        state.status = Status.READY
        if not self._is_still:
            return []  # the refit after the training step takes it along
        state.status = Status.REFITTING
        self._record.deadline = max(self._record.deadline, self._orders.now + self._deadlines.refit)
        return self._refit_orders([name], only=(name,))

    def _refit_orders(self, engines: list[str], only: tuple[str, ...]) -> list[Action]:
        """Order engines to receive, and those that must send to do so."""
        actions: list[Action] = []
        for member in dict.fromkeys([*self._plan.senders, *engines]):
            promise = self._orders.promise(member, Phase.REFITTING, self._remaining_s())
            if member in engines:
                self.engines[member].awaited = {promise["command_id"]}
            actions.append(Dispatch(member=member, order=Refit(version=self.version, only=only, **promise)))
        return actions

    def _quarantine(self, name: str, state: EngineState, doing: str, why: str) -> list[Action]:
        """Refit an engine once more. Raises `CommandFailed` if it has had its second attempt."""
        state.num_failures += 1
        if state.num_failures >= _MOST_FAILURES:
            raise CommandFailed(name, doing, why)
        self._record.quarantined[name] = why
        self._suspects.append(name)
        self._orders.drop(name, Phase.REFITTING, Phase.ATTESTING)
        self._unattested.discard(name)
        state.awaited, state.is_attested = set(), False
        return self._reconnect(name, state)

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
        digests = {name: self._digests[name] for name in [*self._trainers, *waiting]} if self._is_verified else {}
        order = CommitVersion(
            version=self.version,
            digests=digests,
            has_update=self._has_update,
            **self._orders.promise(_SERVICE, Phase.ATTESTING, self._remaining_s()),
        )
        return [Dispatch(member=_SERVICE, order=order)]

    def _take_committed(self, reply: VersionCommitted) -> list[Action]:
        committed, self._committing = self._committing, ()
        actions: list[Action] = []
        for name in committed:
            state = self.engines[name]
            if state.status is not Status.HOLDING:
                continue  # lost meanwhile
            if name in reply.differing:
                what = f"it does not hold version {reply.version}: {reply.differing[name]}"
                actions += self._quarantine(name, state, Phase.ATTESTING.value, what)
            else:
                state.is_attested = True
                self._record.engines.append(name)
        if all(state.is_attested for state in self.engines.values()):
            actions.append(self._finish_record(reply.digest))
        return [*actions, *self._commit()]

    def _finish_record(self, digest: int) -> RecordRefit:
        done, self._record = self._record, _Record(started_at=self._orders.now, deadline=self._record.deadline)
        done.committed(self._orders.now)
        return RecordRefit(
            version=self.version,
            engines=tuple(sorted(done.engines)),
            seconds=done.seconds,
            digest=digest,
            predicted_s=self._plan.predicted_s,
            bound_s=self._plan.bound_s,
            quarantined=done.quarantined,
        )

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    @property
    def _plan(self) -> TransfersPlanned:
        assert self._planned is not None, "transfers are planned before anything else"
        return self._planned

    def _await(self, state: EngineState, actions: list[Action]) -> list[Action]:
        """Have an engine wait for the answers to these orders."""
        state.awaited = {action.order.command_id for action in actions if isinstance(action, Dispatch)}
        return actions

    def _remaining_s(self) -> float:
        """Return what is left of the refit's deadline; a little, if none is, so that the error is the order's own."""
        return max(self._record.deadline - self._orders.now, 1.0)

    def _take_layout(self, engine: str, layout: bytes) -> None:
        if self._planned is not None and self._layouts[engine] != layout:
            what = "its replacement wants other weights than it did, or runs on another host: resume the run instead"
            raise CommandFailed(engine, Phase.BUILDING.value, what)
        self._layouts[engine] = layout


class _Record:
    """What a refit has been so far."""

    def __init__(self, *, started_at: float = 0.0, deadline: float = 0.0) -> None:
        self.deadline = deadline
        self.seconds: dict[str, float] = {}
        self.engines: list[str] = []
        self.quarantined: dict[str, str] = {}
        self.num_sender_failures = 0
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
