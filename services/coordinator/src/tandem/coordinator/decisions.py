"""What the coordinator's plan is told, and what it decides: events in, actions out, all of it plain data."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from tandem.common.errors import ServiceError
from tandem.common.messages import (
    Attest,
    AwaitCheckpoint,
    BuildEngine,
    BuildTrainer,
    CommitVersion,
    ConnectMesh,
    Failed,
    InstallProgram,
    OpenRendezvous,
    PlanTransfers,
    Purpose,
    Refit,
    Reply,
    SaveCheckpoint,
    ServiceKind,
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
    | AwaitCheckpoint
    | BuildEngine
    | PlanTransfers
    | InstallProgram
    | ConnectMesh
    | Refit
    | Attest
    | CommitVersion
)
"""Orders that need nothing but what the plan knows."""


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Send this order."""

    member: str
    order: PlainOrder


class DispatchPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Send this engine the prompt groups `groups` of `step`, as a `Generate`; none, and it only gives up others."""

    member: str
    command_id: int
    deadline_s: float
    step: int
    purpose: Purpose
    groups: tuple[int, ...]
    oldest: int
    """Orders of the kind with a lower command id are given up."""


class DispatchBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Send this trainer the batch of `step`, as a `Train` or an `Evaluate`."""

    member: str
    command_id: int
    deadline_s: float
    step: int
    purpose: Purpose


class DiscardSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Forget the samples of these groups: the engine that made them is lost, or did not hold the version it should."""

    step: int
    purpose: Purpose
    groups: tuple[int, ...]


class Replace(msgspec.Struct, frozen=True, kw_only=True):
    """Get a new process in the place of an engine that is lost."""

    member: str
    why: str


class RecordRefit(msgspec.Struct, frozen=True, kw_only=True):
    """A version has reached these engines and is attested: write that to the journal."""

    version: int
    engines: tuple[str, ...]
    seconds: dict[str, float]
    """Wall seconds by phase: ``transfer``, ``attest`` (beside other work), ``commit``."""
    digest: int
    """Of the whole version; zero if it was not verified."""
    predicted_s: float
    bound_s: float
    quarantined: dict[str, str]
    """Engines that had to be refitted once more, and why."""


class PublishCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Every rank has written its part: give the checkpoint of `step` its final name."""

    step: int


class CommitStep(msgspec.Struct, frozen=True, kw_only=True):
    """Write the step to the journal: now it is done."""

    step: int
    version: int
    seconds: dict[str, float]
    """Wall seconds by phase of this step, and ``total``."""


class Say(msgspec.Struct, frozen=True, kw_only=True):
    """Let the user know."""

    text: str


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over: end every process."""

    outcome: Literal["finished", "interrupted", "failed"]
    error: ServiceError | None = None


Action = (
    Dispatch
    | DispatchPrompts
    | DispatchBatch
    | DiscardSamples
    | Replace
    | RecordRefit
    | PublishCheckpoint
    | CommitStep
    | Say
    | Finish
)


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


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How engines share prompts where ``async_engine`` is on; see `tandem.coordinator.hands`."""

    width: int
    """Samples that an engine runs at once."""
    timeout_s: float | None
    """How long an engine without work waits for others before it takes over their prompts; None for ever."""


class DynamicSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a step goes on generating until enough groups teach something; see `tandem.coordinator.draws`."""

    num_groups: int
    """Groups generated at once."""
    max_batches: int
    """How often, at most."""


class RunShape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that its plan depends on."""

    has_engines: bool
    """Whether samples are generated, and weights moved to where that is done."""
    expected: dict[ServiceKind, int]
    """How many processes of each kind make the run complete."""
    first_step: int
    """The step to begin with: 1, or one after the step a resumed run was saved at."""
    last_step: int
    num_groups: int
    """Prompt groups that a training step trains on; zero without engines."""
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
    is_verified: bool
    """Whether each version is attested by digests before its samples are trained on."""
    max_replacements: int
    """How often each engine may be lost and replaced before the run fails."""
    balance: Balance | None = None
    """None: prompts are dealt like cards."""
    dynamic_sampling: DynamicSampling | None = None
    """None: a step trains on all groups that it generates."""
    deadlines: Deadlines


class Phase(enum.Enum):
    """What the run as a whole, or one order, is about; the value completes "while ..."."""

    JOINING = "joining"
    BUILDING = "building"
    PLANNING = "planning transfers"
    INSTALLING = "installing transfer programs"
    CONNECTING = "connecting meshes"
    REFITTING = "refitting"
    ATTESTING = "attesting a weight version"
    GENERATING = "generating"
    TRAINING = "training"
    VALIDATING = "validating"
    SAVING = "saving a checkpoint"
    WRITING = "writing a checkpoint"
    FINISHED = "finished"
