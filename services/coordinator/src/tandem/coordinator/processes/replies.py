"""The check of replies against their requests; pure, no sockets and no clock.

`Replies` is told of every request that is sent (`expect`) and of every process that is lost (`forget`). Every reply
passes `take` before it becomes an event. A reply that cannot answer its request thus never reaches a batch, a metric or
the journal.

Decoding has already checked each field by itself (the types in `tandem.common.messages`). Here fields are compared with
the request, by one check for each message (`reply_checks`). ``docs/protocol.md`` lists the docstrings of the checks
(``scripts/protocol_page.py``).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

from tandem.common.errors import WireError
from tandem.common.messages import (
    AddGradient,
    AnyCommand,
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
    Failed,
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
    Reply,
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
from tandem.common.wire import Arrays
from tandem.coordinator.processes import reply_checks
from tandem.coordinator.processes.reply_checks import SHOWN, KnownState, SampleLimits, UnansweredRequest, require

Check = Callable[[UnansweredRequest, Any], None]
"""A comparison of a reply with its request. It raises `WireError` if the one cannot answer the other."""

CHECKS: Mapping[type[Message], Mapping[type[Command], Check | None]] = {
    RendezvousOpened: {OpenRendezvous: None},
    TrainerBuilt: {BuildTrainer: reply_checks.check_trainer_built},
    Trained: {Train: reply_checks.check_trained},
    SamplesMissing: {Train: reply_checks.check_samples_missing},
    Evaluated: {Evaluate: reply_checks.check_evaluated},
    CheckpointCopied: {SaveCheckpoint: None},
    CheckpointSaved: {AwaitCheckpoint: None},
    WeightsCopied: {CopyWeights: reply_checks.check_weights_copied},
    GradientAdded: {AddGradient: reply_checks.check_gradient_added},
    OptimizerStepped: {StepOptimizer: reply_checks.check_optimizer_stepped},
    TrainingRestored: {RestoreTraining: None, SwitchTraining: None, KeepWeights: None},
    EngineBuilt: {BuildEngine: reply_checks.check_engine_built},
    SamplesFinished: {
        Generate: reply_checks.check_samples_finished,
        RestoreSamples: reply_checks.check_samples_restored,
    },
    Generated: {Generate: reply_checks.check_generated, RestoreSamples: reply_checks.check_all_restored},
    SamplesRecorded: {RecordSamples: reply_checks.check_samples_recorded},
    ProgramInstalled: {InstallProgram: reply_checks.check_program_installed},
    TransferGroupConnected: {ConnectTransferGroup: reply_checks.check_transfer_group_connected},
    Refitted: {Refit: reply_checks.check_refitted},
    DigestsReported: {ReportDigests: reply_checks.check_digests_reported},
    TransfersPlanned: {PlanTransfers: reply_checks.check_transfers_planned},
    VersionCommitted: {CommitVersion: reply_checks.check_version_committed},
}
"""The check of each reply to each type of request that it may answer; None if there is nothing to compare."""


class Replies:
    """The unanswered requests, and the check whether a reply can answer one."""

    def __init__(self, limits: SampleLimits, newest: int = 0) -> None:
        """`newest` is at least every command id that an earlier coordinator gave out."""
        self._limits = limits
        self._requests: dict[int, UnansweredRequest] = {}
        self._states: dict[str, KnownState] = {}
        self._newest = newest
        """Highest command id so far."""

    def expect(self, name: str, command: AnyCommand) -> None:
        """Note a request that is sent to a process, whose replies are checked against it."""
        self._newest = max(self._newest, command.command_id)
        if isinstance(command, BuildEngine):  # it begins anew, without any version
            self._states[name] = KnownState()
        state = self._states.setdefault(name, KnownState())
        match command:
            case Refit() if name in command.only or not command.only:
                if command.version not in state.versions[-1:]:
                    self._forget_versions(name, state)
                    bisect.insort(state.versions, command.version)
            case Generate() | ReportDigests():  # the requests that this cancels are never answered
                oldest = command.cancel_before if isinstance(command, Generate) else command.command_id
                self._requests = {
                    i: request
                    for i, request in self._requests.items()
                    if request.name != name or type(request.command) is not type(command) or i >= oldest
                }
            case _:
                pass
        self._requests[command.command_id] = UnansweredRequest(
            name=name, command=command, state=state, limits=self._limits, oldest_version=state.version
        )

    def _forget_versions(self, name: str, state: KnownState) -> None:
        """Drop the versions of a process with which it can answer nothing any more: a run may have millions."""
        open_requests = (request.oldest_version for request in self._requests.values() if request.name == name)
        del state.versions[: bisect.bisect_left(state.versions, min([state.version, *open_requests]))]

    def forget(self, name: str) -> None:
        """Expect nothing more of a process; another of its name begins anew."""
        self._requests = {i: request for i, request in self._requests.items() if request.name != name}
        self._states.pop(name, None)

    def forget_commands(self) -> None:
        """Accept no more answers to earlier requests."""
        self._requests = {}

    def take(self, name: str, reply: Reply | Failed, arrays: Arrays) -> bool:
        """Check a reply; return whether it answers an open request, rather than one that is over.

        Raise `WireError` if it cannot be an answer to that request; its text begins with the message and the field.
        """
        request = self._requests.get(reply.command_id)
        try:
            if request is None:
                require(reply.command_id <= self._newest, "command_id", reply.command_id, "of a command")
                return False
            require(
                request.name == name, "command_id", reply.command_id, f"of a command to {name}, not to {request.name}"
            )
            if not isinstance(reply, Failed):
                checks, command = CHECKS[type(reply)], type(request.command)
                if command not in checks:
                    require(False, "command_id", reply.command_id, _describe_answerable(type(reply), command))
                elif (check := checks[command]) is not None:
                    check(request, reply)
            for array in arrays:
                raise WireError(f"{array[:SHOWN]}: arrays came with a message that has none")
        except WireError as error:
            raise WireError(f"{type(reply).__name__}.{error}") from error
        if isinstance(reply, SamplesFinished):
            return True  # more answers follow
        del self._requests[reply.command_id]
        return True


def _describe_answerable(message: type[Message], command: type[Command]) -> str:
    """Describe, for an error, the requests that a message answers instead of this one."""
    names = " or a ".join(each.__name__ for each in CHECKS[message])
    return f"of a {names}, not of a {command.__name__}"


def describe_checks(message: type[Message]) -> str:
    """Describe the checks of a message as an answer, for the protocol's page; empty if it is none."""
    sentences = [
        f"Answers `{command.__name__}`. {(check.__doc__ if check is not None else '') or ''}"
        for command, check in CHECKS.get(message, {}).items()
    ]
    return " ".join(sentences)
