"""Events that the scheduler is told, and actions that it decides, all of it plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import msgspec

from tandem.common import messages
from tandem.common.errors import ServiceError
from tandem.observe.run_folder.journal import Outcome


class GroupSize(msgspec.Struct, frozen=True, kw_only=True):
    """The demand of one rollout group on an engine."""

    num_samples: int
    num_tokens: int
    """The most tokens of each sample: the prompt and the longest response."""


class SampleRecord(msgspec.Struct, frozen=True):
    """One sample, and where its tokens lie."""

    scored: messages.SampleScored
    rollout: str
    command_id: int
    """The id of the `Generate` command it was made for."""


Place = tuple[int, int]
"""A group's place in the data: the step that trains on it, and its number there."""


class RestoredGroup(msgspec.Struct, frozen=True):
    """The location of a restored group."""

    file: str
    """The file's path within the folder of the rollout log."""
    command_id: int
    """The id of the command that it was made for in its attempt."""
    newest_version: int
    """The newest weights that made any of its tokens."""


# --- events ----------------------------------------------------------------------------------------------------------


class ProcessJoined(msgspec.Struct, frozen=True, kw_only=True):
    """A process was admitted."""

    now: float
    process: str
    kind: messages.ServiceKind
    public_key: str = ""


class ProcessReplied(msgspec.Struct, frozen=True, kw_only=True):
    """A process answered a command, or a part of it."""

    now: float
    process: str
    reply: messages.Reply


class CommandErred(msgspec.Struct, frozen=True, kw_only=True):
    """A process could not carry out a command."""

    now: float
    process: str
    failed: messages.Failed


class ProcessLost(msgspec.Struct, frozen=True, kw_only=True):
    """A process died or fell silent."""

    now: float
    process: str
    reason: str


class AwaitedByHand(msgspec.Struct, frozen=True, kw_only=True):
    """A lost process is not replaced by the launcher. Another may be started by hand."""

    now: float
    process: str


class EngineDraining(msgspec.Struct, frozen=True, kw_only=True):
    """An engine was told to leave the run. The event may come again and again."""

    now: float
    process: str


class PromptsDrawn(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of the rollout groups that `DrawPrompts` asked for are known."""

    now: float
    step: int
    purpose: messages.Purpose
    sizes: tuple[GroupSize, ...]
    """The demand of each group on an engine, in order."""


class RestoredFound(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `FindRestored`: groups that were generated before and are yet to be trained on."""

    now: float
    groups: Mapping[Place, RestoredGroup]


class TimePassed(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed."""

    now: float


class StopRequested(msgspec.Struct, frozen=True, kw_only=True):
    """The user asked to stop."""

    now: float


Event = (
    ProcessJoined
    | ProcessReplied
    | CommandErred
    | ProcessLost
    | AwaitedByHand
    | EngineDraining
    | PromptsDrawn
    | RestoredFound
    | TimePassed
    | StopRequested
)


# --- actions ---------------------------------------------------------------------------------------------------------

PlainCommand = (
    messages.OpenRendezvous
    | messages.BuildTrainer
    | messages.SaveCheckpoint
    | messages.AwaitCheckpoint
    | messages.CopyWeights
    | messages.BuildEngine
    | messages.PlanTransfers
    | messages.InstallProgram
    | messages.ConnectTransferGroup
    | messages.Refit
    | messages.ReportDigests
    | messages.CommitVersion
    | messages.RestoreSamples
)
"""The commands that need nothing but what the scheduler knows."""


class CommandFields(TypedDict):
    """The two fields every command has."""

    command_id: int
    deadline_s: float


class DispatchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Send this command."""

    process: str
    command: PlainCommand


class DrawPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Draw the prompts of these rollout groups of `step` from the data, and answer with `PromptsDrawn`."""

    step: int
    purpose: messages.Purpose
    groups: range


class FindRestored(msgspec.Struct, frozen=True, kw_only=True):
    """Find the groups generated before that no engine is still writing, and answer with `RestoredFound`."""


class DispatchPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Send an engine the rollout groups `groups` of `step` as a `Generate`. With no groups, it only cancels others."""

    process: str
    command_id: int
    deadline_s: float
    step: int
    purpose: messages.Purpose
    groups: tuple[int, ...]
    cancel_before: int
    """Commands of this kind with a lower id are cancelled."""


class DispatchBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Make the batch of `step`, and send its table to every trainer, as a `Train` or an `Evaluate`."""

    step: int
    purpose: messages.Purpose
    commands: dict[str, CommandFields]
    """The fields of each trainer's command, by its name."""


class DispatchGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Make a batch of these groups of `step`, and send its table to every trainer, as a `StreamGroups`."""

    step: int
    groups: tuple[int, ...]
    commands: dict[str, CommandFields]
    """Same as in `DispatchBatch`."""


class DispatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Have this rollout log the samples of a step, from itself or another rollout, as a `RecordSamples`."""

    process: str
    command_id: int
    deadline_s: float
    step: int
    rollout: str
    purpose: messages.Purpose = "train"


class StepValidated(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the samples that validated `step`, which are to be logged."""

    step: int
    records: tuple[SampleRecord, ...]


class StepRecorded(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of `step`, or of its validation, are in the rollout log, except those reported missing."""

    step: int
    purpose: messages.Purpose = "train"
    rollouts: tuple[str, ...]
    """The rollouts with written parts, without those that were given up."""
    num_bytes: int


class DropRestored(msgspec.Struct, frozen=True, kw_only=True):
    """Drop the restored groups that were made with this version or a later one."""

    version: int
    num_groups: int
    """The number of groups that are dropped."""


class DiscardSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Forget the samples of these groups: their engine is lost, or did not hold the right version."""

    step: int
    purpose: messages.Purpose
    groups: tuple[int, ...]


class ReplaceEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Start a new process in the place of a lost engine."""

    process: str
    reason: str


class LetGo(msgspec.Struct, frozen=True, kw_only=True):
    """Let an engine go that is draining, or that cannot join."""

    process: str
    reason: str
    is_awaited: bool = False
    """Whether the run must wait for another engine to join."""


class RecordRefit(msgspec.Struct, frozen=True, kw_only=True):
    """Write to the journal that a version has reached these engines and is verified."""

    version: int
    engines: tuple[str, ...]
    seconds: dict[str, float]
    """Wall seconds by phase: ``transfer``, ``verify`` (beside other work), ``commit``."""
    digest: int
    """Digest of the whole version; zero if it was not verified."""
    predicted_s: float
    bound_s: float
    quarantined: dict[str, str]
    """The engines that had to be refitted once more, with the reason."""


class PublishCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Give the checkpoint of `step` its final name, now that every rank has written its part."""

    step: int


class CommitStep(msgspec.Struct, frozen=True, kw_only=True):
    """Write to the journal that the step is done."""

    step: int
    version: int
    seconds: dict[str, float]
    """Wall seconds by phase of this step, and ``total``."""
    validated: tuple[messages.SampleScored, ...] = ()
    """The validation samples of the step, in order; none without validation, or if it evaluates a batch."""
    metrics: dict[str, float] = {}
    """Metrics of an asynchronous run: idle time of engines and trainers, and the groups that waited for training."""


class TellUser(msgspec.Struct, frozen=True, kw_only=True):
    """Let the user know."""

    text: str


class FinishRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over: end every process."""

    outcome: Outcome
    error: ServiceError | None = None
    is_out_of_time: bool = False
    """Whether ``checkpointing.checkpoint_must_save_by`` was the only reason for the interruption."""


Action = (
    DispatchCommand
    | DrawPrompts
    | FindRestored
    | DispatchPrompts
    | DispatchBatch
    | DispatchGroups
    | DispatchRecord
    | StepValidated
    | StepRecorded
    | DropRestored
    | DiscardSamples
    | ReplaceEngine
    | LetGo
    | RecordRefit
    | PublishCheckpoint
    | CommitStep
    | TellUser
    | FinishRun
)
