"""The table of replies: the rule of each, by the type of request that it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from tandem.coordinator.processes import occasional_rules as occasional
from tandem.coordinator.processes import reply_rules as steady
from tandem.coordinator.processes import setting_up_rules as setting_up
from tandem.coordinator.processes.reply_checks import (
    Asked,
)


class Rule(NamedTuple):
    """The rule by which a reply answers a type of request."""

    command: type[Command]
    """Type of the request."""
    check: Callable[[Asked, Any], None] | None
    """Comparison of the reply with the request; None if there is nothing to compare."""


RULES: Mapping[type[Message], tuple[Rule, ...]] = {
    RendezvousOpened: (Rule(OpenRendezvous, None),),
    TrainerBuilt: (Rule(BuildTrainer, setting_up.trainer_built),),
    Trained: (Rule(Train, steady.trained),),
    SamplesMissing: (Rule(Train, occasional.samples_missing),),
    Evaluated: (Rule(Evaluate, occasional.evaluated),),
    CheckpointCopied: (Rule(SaveCheckpoint, None),),
    CheckpointSaved: (Rule(AwaitCheckpoint, None),),
    WeightsCopied: (Rule(CopyWeights, occasional.weights_copied),),
    GradientAdded: (Rule(AddGradient, occasional.gradient_added),),
    OptimizerStepped: (Rule(StepOptimizer, occasional.optimizer_stepped),),
    TrainingRestored: (Rule(RestoreTraining, None), Rule(SwitchTraining, None)),
    EngineBuilt: (Rule(BuildEngine, setting_up.engine_built),),
    SamplesFinished: (Rule(Generate, steady.samples_finished), Rule(RestoreSamples, occasional.samples_restored)),
    Generated: (Rule(Generate, steady.generated), Rule(RestoreSamples, occasional.all_restored)),
    SamplesRecorded: (Rule(RecordSamples, steady.samples_recorded),),
    ProgramInstalled: (Rule(InstallProgram, setting_up.program_installed),),
    TransferGroupConnected: (Rule(ConnectTransferGroup, setting_up.mesh_connected),),
    Refitted: (Rule(Refit, steady.refitted),),
    DigestsReported: (Rule(ReportDigests, steady.verified),),
    TransfersPlanned: (Rule(PlanTransfers, setting_up.transfers_planned),),
    VersionCommitted: (Rule(CommitVersion, steady.version_committed),),
}
CHECKS = {(message, rule.command): rule.check for message, rules in RULES.items() for rule in rules}
"""The check of each message as the answer to each type of request; a pair that is not here is none."""


def answerable(message: type[Message], command: type[Command]) -> str:
    """Describe, for an error, the requests that a message answers instead of this one."""
    names = " or a ".join(rule.command.__name__ for rule in RULES[message])
    return f"of a {names}, not of a {command.__name__}"


def rule_of(message: type[Message]) -> str:
    """Return the rules of a message as an answer, for the protocol's page; empty if it is none."""
    said = [
        f"Answers `{command.__name__}`. {(check.__doc__ if check is not None else '') or ''}"
        for command, check in RULES.get(message, ())
    ]
    return " ".join(said)
