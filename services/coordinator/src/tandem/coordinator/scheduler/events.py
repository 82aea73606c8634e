"""Events that the scheduler is told, and actions that it decides, all of it plain data."""

from __future__ import annotations

from collections.abc import Mapping
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
    CopyWeights,
    Failed,
    InstallProgram,
    OpenRendezvous,
    PlanTransfers,
    Purpose,
    Refit,
    Reply,
    RestoreSamples,
    SampleScored,
    SaveCheckpoint,
    ServiceKind,
)


class GroupSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout group asks of an engine."""

    num_samples: int
    num_tokens: int
    """Of each sample, at most: the prompt and the longest response."""


class SampleRecord(msgspec.Struct, frozen=True):
    """One sample, and where its tokens lie."""

    scored: SampleScored
    rollout: str
    command_id: int
    """Of the order to generate that it was made for."""


Place = tuple[int, int]
"""Of a group: the step that trains on it, and its number there."""


class KeptGroup(msgspec.Struct, frozen=True):
    """Where a kept group lies."""

    file: str
    """Its path within the folder of the record of samples."""
    command_id: int
    """Of the order that it was made for then."""
    newest_version: int
    """The newest weights that made any of its tokens."""


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


class AwaitedByHand(msgspec.Struct, frozen=True, kw_only=True):
    """In the place of a process that is lost none is launched: another may be started by hand."""

    now: float
    member: str


class ToldToLeave(msgspec.Struct, frozen=True, kw_only=True):
    """An engine was told to leave the run, and says so: once, or again and again."""

    now: float
    member: str


class PromptsDrawn(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of the rollout groups that `DrawPrompts` asked for are known."""

    now: float
    step: int
    purpose: Purpose
    sizes: tuple[GroupSize, ...]
    """What each group asks of an engine, in order."""


class KeptFound(msgspec.Struct, frozen=True, kw_only=True):
    """What `FindKept` asked for: the groups that were generated before, and are still to be trained on."""

    now: float
    groups: Mapping[Place, KeptGroup]


class Ticked(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed."""

    now: float


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """The user asked to stop."""

    now: float


Event = Joined | Replied | Erred | Lost | AwaitedByHand | ToldToLeave | PromptsDrawn | KeptFound | Ticked | Interrupted


# --- actions ---------------------------------------------------------------------------------------------------------

PlainOrder = (
    OpenRendezvous
    | BuildTrainer
    | SaveCheckpoint
    | AwaitCheckpoint
    | CopyWeights
    | BuildEngine
    | PlanTransfers
    | InstallProgram
    | ConnectMesh
    | Refit
    | Attest
    | CommitVersion
    | RestoreSamples
)
"""Orders that need nothing but what the scheduler knows."""


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Send this order."""

    member: str
    order: PlainOrder


class DrawPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Draw the prompts of these rollout groups of `step` from the data, and answer with `PromptsDrawn`."""

    step: int
    purpose: Purpose
    groups: range


class FindKept(msgspec.Struct, frozen=True, kw_only=True):
    """Find what was generated before, of which no engine writes any more, and answer with `KeptFound`."""


class DispatchPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Send this engine the rollout groups `groups` of `step`, as a `Generate`; none, and it only cancels others."""

    member: str
    command_id: int
    deadline_s: float
    step: int
    purpose: Purpose
    groups: tuple[int, ...]
    cancel_before: int
    """Orders of the kind with a lower command id are cancelled."""


class DispatchBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Send this trainer the batch of `step`, as a `Train` or an `Evaluate`."""

    member: str
    command_id: int
    deadline_s: float
    step: int
    purpose: Purpose


class DispatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Have this rollout record what `step` had of a rollout, itself or another, as a `RecordSamples`."""

    member: str
    command_id: int
    deadline_s: float
    step: int
    rollout: str
    purpose: Purpose = "train"


class StepValidated(msgspec.Struct, frozen=True, kw_only=True):
    """Keep which samples `step` was validated by: they are to be recorded."""

    step: int
    records: tuple[SampleRecord, ...]


class StepRecorded(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `step` trained on, or was validated by, is in the record, but for what was said to be missing."""

    step: int
    purpose: Purpose = "train"
    rollouts: tuple[str, ...]
    """Whose parts are written; not those that were given up."""
    num_bytes: int


class DropKept(msgspec.Struct, frozen=True, kw_only=True):
    """Of what had been generated before the run was resumed, nothing made with this version or a later one counts."""

    version: int
    num_groups: int
    """That were to be trained on, and are not."""


class DiscardSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Forget the samples of these groups: the engine that made them is lost, or did not hold the version it should."""

    step: int
    purpose: Purpose
    groups: tuple[int, ...]


class Replace(msgspec.Struct, frozen=True, kw_only=True):
    """Get a new process in the place of an engine that is lost."""

    member: str
    why: str


class LetGo(msgspec.Struct, frozen=True, kw_only=True):
    """Have an engine go: it was told to leave, or cannot join."""

    member: str
    why: str
    is_awaited: bool = False
    """Whether the run cannot go on before another has joined."""


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
    validated: tuple[SampleScored, ...] = ()
    """The samples of its validation, in order; none if it had none, or evaluates a batch."""
    metrics: dict[str, float] = {}
    """Of an asynchronous run: how long engines and trainers were idle, and what waited to be trained on."""


class Say(msgspec.Struct, frozen=True, kw_only=True):
    """Let the user know."""

    text: str


Outcome = Literal["finished", "interrupted", "failed"]
"""How a run ends."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over: end every process."""

    outcome: Outcome
    error: ServiceError | None = None
    is_out_of_time: bool = False
    """Whether it was interrupted by ``checkpointing.checkpoint_must_save_by``, and by nothing else."""


Action = (
    Dispatch
    | DrawPrompts
    | FindKept
    | DispatchPrompts
    | DispatchBatch
    | DispatchRecord
    | StepValidated
    | StepRecorded
    | DropKept
    | DiscardSamples
    | Replace
    | LetGo
    | RecordRefit
    | PublishCheckpoint
    | CommitStep
    | Say
    | Finish
)
