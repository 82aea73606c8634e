"""The table of checks: that of each reply, by the type of request that it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tandem.common.messages import (
    AddGradient,
    AwaitCheckpoint,
    BuildEngine,
    BuildTrainer,
    CheckpointCopied,
    CheckpointSaved,
    Command,
    CommitVersion,
    ConnectTransferGroup,
    CopyWeights,
    DigestsReported,
    EngineBuilt,
    Evaluate,
    Evaluated,
    Generate,
    Generated,
    GradientAdded,
    InstallProgram,
    KeepWeights,
    Message,
    OpenRendezvous,
    OptimizerStepped,
    PlanTransfers,
    ProgramInstalled,
    RecordSamples,
    Refit,
    Refitted,
    RendezvousOpened,
    ReportDigests,
    RestoreSamples,
    RestoreTraining,
    SamplesFinished,
    SamplesMissing,
    SamplesRecorded,
    SaveCheckpoint,
    StepOptimizer,
    SwitchTraining,
    Train,
    Trained,
    TrainerBuilt,
    TrainingRestored,
    TransferGroupConnected,
    TransfersPlanned,
    VersionCommitted,
    WeightsCopied,
)
from tandem.coordinator.processes import occasional_checks as occasional
from tandem.coordinator.processes import reply_checks as steady
from tandem.coordinator.processes import setting_up_checks as setting_up
from tandem.coordinator.processes.reply_checks import UnansweredRequest

Check = Callable[[UnansweredRequest, Any], None]
"""A comparison of a reply with its request. It raises `WireError` if the one cannot answer the other."""

CHECKS: Mapping[type[Message], Mapping[type[Command], Check | None]] = {
    RendezvousOpened: {OpenRendezvous: None},
    TrainerBuilt: {BuildTrainer: setting_up.trainer_built},
    Trained: {Train: steady.trained},
    SamplesMissing: {Train: occasional.samples_missing},
    Evaluated: {Evaluate: occasional.evaluated},
    CheckpointCopied: {SaveCheckpoint: None},
    CheckpointSaved: {AwaitCheckpoint: None},
    WeightsCopied: {CopyWeights: occasional.weights_copied},
    GradientAdded: {AddGradient: occasional.gradient_added},
    OptimizerStepped: {StepOptimizer: occasional.optimizer_stepped},
    TrainingRestored: {RestoreTraining: None, SwitchTraining: None, KeepWeights: None},
    EngineBuilt: {BuildEngine: setting_up.engine_built},
    SamplesFinished: {Generate: steady.samples_finished, RestoreSamples: occasional.samples_restored},
    Generated: {Generate: steady.generated, RestoreSamples: occasional.all_restored},
    SamplesRecorded: {RecordSamples: steady.samples_recorded},
    ProgramInstalled: {InstallProgram: setting_up.program_installed},
    TransferGroupConnected: {ConnectTransferGroup: setting_up.transfer_group_connected},
    Refitted: {Refit: steady.refitted},
    DigestsReported: {ReportDigests: steady.verified},
    TransfersPlanned: {PlanTransfers: setting_up.transfers_planned},
    VersionCommitted: {CommitVersion: steady.version_committed},
}
"""The check of each reply to each type of request that it may answer; None if there is nothing to compare."""


def answerable(message: type[Message], command: type[Command]) -> str:
    """Describe, for an error, the requests that a message answers instead of this one."""
    names = " or a ".join(each.__name__ for each in CHECKS[message])
    return f"of a {names}, not of a {command.__name__}"


def checks_of(message: type[Message]) -> str:
    """Describe the checks of a message as an answer, for the protocol's page; empty if it is none."""
    sentences = [
        f"Answers `{command.__name__}`. {(check.__doc__ if check is not None else '') or ''}"
        for command, check in CHECKS.get(message, {}).items()
    ]
    return " ".join(sentences)
