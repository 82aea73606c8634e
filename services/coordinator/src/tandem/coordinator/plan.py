"""What to do next: the coordinator's decisions, pure.

`SynchronousPlan.handle` takes one event and returns the actions it leads to. It opens no socket, reads no clock (every
event carries ``now``), touches no file and knows no arrays, so that a whole run, with every failure in it, is tested as
a list of events and actions. `tandem.coordinator.loop` carries the actions out.

The synchronous plan does one phase at a time::

    joining -> building -> planning -> installing -> refitting -> committing the version -> [validating] -> [saving]
                                                         ^                                                     |
                                                         |                                            commit the step
                                                         |                                                     |
                                                      training  <------------------ generating  <--------------+

A phase is over when nothing is outstanding: every order it gave was answered. SFT has no engines: it goes from building
to training, and from training to validating.
"""

from __future__ import annotations

import enum
from typing import Literal, TypedDict, assert_never

import msgspec

from tandem.common.errors import CommandFailed, DeadlineExceeded, ServiceError, ServiceLost
from tandem.common.messages import (
    BuildEngine,
    BuildTrainer,
    CheckpointSaved,
    CommitVersion,
    EngineBuilt,
    Evaluated,
    Failed,
    Generated,
    InstallProgram,
    OpenRendezvous,
    PlanTransfers,
    ProgramInstalled,
    Purpose,
    Refit,
    Refitted,
    RendezvousOpened,
    Reply,
    SamplesFinished,
    SaveCheckpoint,
    ServiceKind,
    Trained,
    TrainerBuilt,
    TransfersPlanned,
    VersionCommitted,
)

# --- events ----------------------------------------------------------------------------------------------------------


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """A process was admitted."""

    now: float
    member: str
    kind: ServiceKind


class Replied(msgspec.Struct, frozen=True, kw_only=True):
    """A process answered a command, or a part of it."""

    now: float
    member: str
    reply: Reply


class Erred(msgspec.Struct, frozen=True, kw_only=True):
    """A process could not carry out a command."""

    now: float
    member: str
    failed: Failed


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A process died or fell silent."""

    now: float
    member: str
    why: str


class Ticked(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed."""

    now: float


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """The user asked to stop."""

    now: float


Event = Joined | Replied | Erred | Lost | Ticked | Interrupted


# --- actions ---------------------------------------------------------------------------------------------------------

PlainOrder = (
    OpenRendezvous
    | BuildTrainer
    | SaveCheckpoint
    | BuildEngine
    | InstallProgram
    | Refit
    | PlanTransfers
    | CommitVersion
)
"""Orders that need nothing but what the plan knows."""


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Send this order."""

    member: str
    order: PlainOrder


class DispatchPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Send this engine the prompt groups `groups` of `step`, as a `Generate`."""

    member: str
    command_id: int
    deadline_s: float
    step: int
    purpose: Purpose
    groups: tuple[int, ...]


class DispatchBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Send this trainer the batch of `step`, as a `Train` or an `Evaluate`."""

    member: str
    command_id: int
    deadline_s: float
    step: int
    purpose: Purpose


class PublishCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Every rank has written its part: give the checkpoint of `step` its final name."""

    step: int


class CommitStep(msgspec.Struct, frozen=True, kw_only=True):
    """Write the step to the journal: now it is done."""

    step: int
    version: int
    seconds: dict[str, float]
    """Wall seconds by phase of this step, and ``total``."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over: end every process."""

    outcome: Literal["finished", "interrupted", "failed"]
    error: ServiceError | None = None


Action = Dispatch | DispatchPrompts | DispatchBatch | PublishCheckpoint | CommitStep | Finish


# --- what the plan is told at the start ------------------------------------------------------------------------------


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds each kind of order may take."""

    join: float
    build: float
    generate: float
    train: float
    evaluate: float
    refit: float
    save: float


class RunShape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that its plan depends on."""

    algorithm: Literal["grpo", "sft"]
    expected: dict[ServiceKind, int]
    """How many processes of each kind make the run complete."""
    first_step: int
    """The step to begin with: 1, or one after the step a resumed run was saved at."""
    last_step: int
    num_groups: int
    """Prompt groups a training step; zero for SFT."""
    num_validation_groups: int
    validate_every: int
    """Steps between validations; zero for never."""
    validate_at_start: bool
    save_every: int
    """Steps between checkpoints; zero for never. The last step is always saved unless it is zero."""
    resume_from: str
    """Checkpoint folder to restore; empty for none."""
    checkpoint_folder: str
    """Folder a checkpoint is written to before it gets its final name; ``{step}`` stands for the step."""
    allow_alias: bool
    deadlines: Deadlines


class Phase(enum.Enum):
    """What the run as a whole is doing; the value completes "while ..."."""

    JOINING = "joining"
    BUILDING = "building"
    PLANNING = "planning transfers"
    INSTALLING = "installing transfer programs"
    REFITTING = "refitting"
    COMMITTING = "committing a weight version"
    GENERATING = "generating"
    TRAINING = "training"
    VALIDATING = "validating"
    SAVING = "saving a checkpoint"
    FINISHED = "finished"


class Outstanding(msgspec.Struct, frozen=True, kw_only=True):
    """An order that was not answered yet."""

    member: str
    phase: Phase
    deadline: float
    allowed_s: float


class Promise(TypedDict):
    """The two fields every command has."""

    command_id: int
    deadline_s: float


class SynchronousPlan:
    """Generate, train, refit, one after the other: no sample is ever older than the weights it trains."""

    def __init__(self, shape: RunShape, now: float) -> None:
        self.shape = shape
        self.phase = Phase.JOINING
        self.step = shape.first_step - 1
        """The step in progress, or the last one done."""
        self.members: dict[str, ServiceKind] = {}
        self.outstanding: dict[int, Outstanding] = {}
        self._next_command_id = 1
        self._phase_since = self._step_since = now
        self._seconds: dict[str, float] = {}
        self._now = now
        self._layouts: dict[str, bytes] = {}
        self._digests: dict[str, int] = {}
        self._programs: dict[str, bytes] = {}
        self._version = shape.first_step - 1
        self._trained = False
        """Whether the step in progress has stepped the optimizer."""
        self._committed = False
        """Whether the step in progress is in the journal; true while an interrupted run saves the step before."""
        self._interrupted = False

    def handle(self, event: Event) -> list[Action]:
        """Take one event; return the actions it leads to, in order."""
        self._now = event.now
        if self.phase is Phase.FINISHED:
            return []
        match event:
            case Joined(member=member, kind=kind):
                self.members[member] = kind
                actions: list[Action] = []
            case Replied(member=member, reply=reply):
                actions = self._take_reply(member, reply)
            case Erred(member=member, failed=failed):
                return self._fail_command(member, failed)
            case Lost(member=member, why=why):
                return self._fail(ServiceLost(member, self.phase.value, why))
            case Ticked():
                return self._check_deadlines()
            case Interrupted():
                return self._interrupt()
            case other:
                assert_never(other)
        if not actions and not self.outstanding:
            actions = self._next_phase()
        return actions

    # --- replies -----------------------------------------------------------------------------------------------------

    def _take_reply(self, member: str, reply: Reply) -> list[Action]:
        if reply.command_id not in self.outstanding:
            return []  # a repetition, or the answer to an order that was abandoned
        if isinstance(reply, SamplesFinished):
            return []  # part of an answer; the loop keeps the samples
        del self.outstanding[reply.command_id]
        match reply:
            case RendezvousOpened(host=host, port=port):
                return self._build_trainers(host, port)
            case TrainerBuilt(layout=layout, digest=digest):
                self._layouts[member] = layout
                self._digests[member] = digest
            case EngineBuilt(layout=layout):
                self._layouts[member] = layout
            case TransfersPlanned(programs=programs):
                self._programs = programs
            case Refitted(digest=digest):
                self._digests[member] = digest
            case Trained(digest=digest):
                self._digests[member] = digest
            case ProgramInstalled() | VersionCommitted() | Generated() | Evaluated() | CheckpointSaved():
                pass
            case other:
                assert_never(other)
        return []

    def _build_trainers(self, host: str, port: int) -> list[Action]:
        ranks = self._all("trainer")
        return [
            Dispatch(
                member=rank,
                order=BuildTrainer(
                    rendezvous_host=host,
                    rendezvous_port=port,
                    world_size=len(ranks),
                    version=self._version,
                    checkpoint=self.shape.resume_from,
                    **self._promise(rank),
                ),
            )
            for rank in ranks
        ]

    # --- phases ------------------------------------------------------------------------------------------------------

    def _next_phase(self) -> list[Action]:
        """Leave the current phase, in which nothing is outstanding, and enter the one that follows."""
        match self.phase:
            case Phase.JOINING:
                return self._build() if self._everyone_is_here() else []
            case Phase.BUILDING:
                return self._plan_transfers() if self._has_engines() else self._begin()
            case Phase.PLANNING:
                return self._install()
            case Phase.INSTALLING:
                return self._refit()
            case Phase.REFITTING:
                return self._commit_version()
            case Phase.COMMITTING:
                return self._validate_or_go_on() if self._trained else self._begin()
            case Phase.GENERATING:
                return self._train()
            case Phase.TRAINING:
                self._trained = True
                self._version = self.step
                if self._interrupted or not self._has_engines():
                    return self._validate_or_go_on()
                return self._refit()
            case Phase.VALIDATING:
                return self._save_or_go_on()
            case Phase.SAVING:
                publish = PublishCheckpoint(step=self.step)
                return [publish, *(self._finish("interrupted") if self._committed else self._commit_step())]
            case Phase.FINISHED:
                return []
            case other:
                assert_never(other)

    def _build(self) -> list[Action]:
        self._enter(Phase.BUILDING)
        meet = OpenRendezvous(**self._promise("trainer-0"))
        return [
            Dispatch(member="trainer-0", order=meet),
            *(Dispatch(member=e, order=BuildEngine(**self._promise(e))) for e in self._all("rollout")),
        ]

    def _plan_transfers(self) -> list[Action]:
        self._enter(Phase.PLANNING)
        order = PlanTransfers(
            sources={name: self._layouts[name] for name in self._all("trainer")},
            destinations={name: self._layouts[name] for name in self._all("rollout")},
            allow_alias=self.shape.allow_alias,
            **self._promise("refit-0"),
        )
        return [Dispatch(member="refit-0", order=order)]

    def _install(self) -> list[Action]:
        self._enter(Phase.INSTALLING)
        return [
            Dispatch(member=engine, order=InstallProgram(program=program, **self._promise(engine)))
            for engine, program in self._programs.items()
        ]

    def _refit(self) -> list[Action]:
        self._enter(Phase.REFITTING)
        return [
            Dispatch(member=engine, order=Refit(version=self._version, **self._promise(engine)))
            for engine in self._all("rollout")
        ]

    def _commit_version(self) -> list[Action]:
        self._enter(Phase.COMMITTING)
        order = CommitVersion(
            version=self._version,
            sources={name: self._digests[name] for name in self._all("trainer")},
            destinations={name: self._digests[name] for name in self._all("rollout")},
            **self._promise("refit-0"),
        )
        return [Dispatch(member="refit-0", order=order)]

    def _begin(self) -> list[Action]:
        """Everything is built: validate the starting weights if asked to, else start the first step."""
        self._step_since = self._now
        self._seconds = {}
        if self._interrupted:
            return self._finish("interrupted")
        if self.shape.validate_at_start and self.step == 0:
            return self._validate()
        return self._next_step()

    def _next_step(self) -> list[Action]:
        if self._interrupted:
            return self._finish("interrupted")
        if self.step >= self.shape.last_step:
            return self._finish("finished")
        self.step += 1
        self._trained = self._committed = False
        self._step_since = self._now
        self._seconds = {}
        return self._generate() if self._has_engines() else self._train()

    def _generate(self) -> list[Action]:
        self._enter(Phase.GENERATING)
        return self._dispatch_prompts("train", self.shape.num_groups)

    def _train(self) -> list[Action]:
        self._enter(Phase.TRAINING)
        return self._dispatch_batches("train")

    def _validate_or_go_on(self) -> list[Action]:
        every = self.shape.validate_every
        due = every > 0 and (self.step % every == 0 or self.step == self.shape.last_step)
        if due and not self._interrupted:
            return self._validate()
        return self._save_or_go_on()

    def _validate(self) -> list[Action]:
        self._enter(Phase.VALIDATING)
        if self._has_engines():
            return self._dispatch_prompts("validate", self.shape.num_validation_groups)
        return self._dispatch_batches("validate")

    def _save_or_go_on(self) -> list[Action]:
        every = self.shape.save_every
        due = every > 0 and (self.step % every == 0 or self.step == self.shape.last_step or self._interrupted)
        return self._save() if due and self.step > 0 else self._commit_step()

    def _save(self) -> list[Action]:
        self._enter(Phase.SAVING)
        folder = self.shape.checkpoint_folder.format(step=self.step)
        return [
            Dispatch(member=rank, order=SaveCheckpoint(folder=folder, step=self.step, **self._promise(rank)))
            for rank in self._all("trainer")
        ]

    def _commit_step(self) -> list[Action]:
        self._note_phase_seconds()
        seconds = {**self._seconds, "total": self._now - self._step_since}
        self._committed = True
        return [CommitStep(step=self.step, version=self._version, seconds=seconds), *self._next_step()]

    # --- the end -----------------------------------------------------------------------------------------------------

    def _interrupt(self) -> list[Action]:
        """Finish a step that is training, abandon one that is generating; then save and end. Asked twice: end now."""
        if self._interrupted or self.phase in (
            Phase.JOINING,
            Phase.BUILDING,
            Phase.PLANNING,
            Phase.INSTALLING,
        ):
            return self._finish("interrupted")
        self._interrupted = True
        if self.phase is Phase.VALIDATING:
            self.outstanding.clear()
            return self._save_or_go_on()
        if self.phase is Phase.GENERATING:
            self.outstanding.clear()
            return self._abandon_step()
        return []

    def _abandon_step(self) -> list[Action]:
        """Go back to the last step that was done, and save it if it was not saved."""
        self.step -= 1
        self._committed = True
        if self.step < self.shape.first_step or self.shape.save_every == 0 or self.step % self.shape.save_every == 0:
            return self._finish("interrupted")
        return self._save()

    def _check_deadlines(self) -> list[Action]:
        if self.phase is Phase.JOINING and self._now - self._phase_since > self.shape.deadlines.join:
            return self._fail(DeadlineExceeded("coordinator", "waiting for processes to join", self.missing()))
        for outstanding in self.outstanding.values():
            if self._now > outstanding.deadline:
                what = f"no answer within {outstanding.allowed_s:g} s"
                return self._fail(DeadlineExceeded(outstanding.member, outstanding.phase.value, what))
        return []

    def missing(self) -> str:
        """Say which processes a run that is joining still waits for."""
        joined = {kind: len(self._all(kind)) for kind in self.shape.expected}
        absent = {kind: n - joined[kind] for kind, n in self.shape.expected.items() if n > joined[kind]}
        counts = " and ".join(f"{n} {kind}" for kind, n in absent.items())
        return f"{counts} did not join within {self.shape.deadlines.join:g} s"

    def _fail_command(self, member: str, failed: Failed) -> list[Action]:
        if failed.command_id not in self.outstanding:
            return []
        what = failed.error if failed.expected else f"{failed.error}\n{failed.traceback}"
        return self._fail(CommandFailed(member, failed.phase, what))

    def _fail(self, error: ServiceError) -> list[Action]:
        self._enter(Phase.FINISHED)
        self.outstanding.clear()
        return [Finish(outcome="failed", error=error)]

    def _finish(self, outcome: Literal["finished", "interrupted"]) -> list[Action]:
        self._enter(Phase.FINISHED)
        self.outstanding.clear()
        return [Finish(outcome=outcome)]

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    def _all(self, kind: ServiceKind) -> list[str]:
        """Members of a kind, in the order of their index."""
        return sorted((m for m, k in self.members.items() if k == kind), key=lambda m: int(m.rpartition("-")[2]))

    def _everyone_is_here(self) -> bool:
        return all(len(self._all(kind)) >= n for kind, n in self.shape.expected.items())

    def _has_engines(self) -> bool:
        return self.shape.algorithm != "sft"

    def _enter(self, phase: Phase) -> None:
        self._note_phase_seconds()
        self.phase = phase
        self._phase_since = self._now

    def _note_phase_seconds(self) -> None:
        """Add the time since the phase began to the step's breakdown, once."""
        name = _BREAKDOWN.get(self.phase)
        if name is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now - self._phase_since
        self._phase_since = self._now

    def _allowed_s(self) -> float:
        deadlines = self.shape.deadlines
        allowed: dict[Phase, float] = {
            Phase.BUILDING: deadlines.build,
            Phase.PLANNING: deadlines.build,
            Phase.INSTALLING: deadlines.build,
            Phase.REFITTING: deadlines.refit,
            Phase.COMMITTING: deadlines.refit,
            Phase.GENERATING: deadlines.generate,
            Phase.TRAINING: deadlines.train,
            Phase.VALIDATING: deadlines.generate if self._has_engines() else deadlines.evaluate,
            Phase.SAVING: deadlines.save,
        }
        return allowed[self.phase]

    def _promise(self, member: str) -> Promise:
        """Open an outstanding order for `member`."""
        command_id = self._next_command_id
        self._next_command_id += 1
        allowed_s = self._allowed_s()
        self.outstanding[command_id] = Outstanding(
            member=member, phase=self.phase, deadline=self._now + allowed_s, allowed_s=allowed_s
        )
        return Promise(command_id=command_id, deadline_s=allowed_s)

    def _dispatch_prompts(self, purpose: Purpose, num_groups: int) -> list[Action]:
        """Deal the groups to the engines like cards: the same run deals the same hands."""
        engines = self._all("rollout")
        hands = {engine: tuple(range(i, num_groups, len(engines))) for i, engine in enumerate(engines)}
        return [
            DispatchPrompts(member=engine, step=self.step, purpose=purpose, groups=groups, **self._promise(engine))
            for engine, groups in hands.items()
            if groups
        ]

    def _dispatch_batches(self, purpose: Purpose) -> list[Action]:
        return [
            DispatchBatch(member=rank, step=self.step, purpose=purpose, **self._promise(rank))
            for rank in self._all("trainer")
        ]


_BREAKDOWN: dict[Phase, str] = {
    Phase.GENERATING: "generation",
    Phase.TRAINING: "training",
    Phase.REFITTING: "refit",
    Phase.COMMITTING: "refit",
    Phase.VALIDATING: "validation",
    Phase.SAVING: "checkpointing",
}
"""Phases that a step's time is divided into; the trainer's own breakdown of training comes with `Trained`."""
