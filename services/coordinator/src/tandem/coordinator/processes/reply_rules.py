"""The rules of replies: how each must match its request; ``docs/protocol.md`` lists them."""

from __future__ import annotations

import bisect
import math
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
from tandem.common.worker_shards import process_of
from tandem.coordinator.processes import setting_up_rules as setting_up
from tandem.coordinator.processes.reply_checks import (
    Asked,
    all_among,
    check_branches,
    check_digests,
    check_samples,
    finite,
    fits,
    measured,
    must,
    same,
    some,
)


class Rule(NamedTuple):
    """The rule by which a reply answers a type of request."""

    command: type[Command]
    """Type of the request."""
    check: Callable[[Asked, Any], None] | None
    """Comparison of the reply with the request; None if there is nothing to compare."""


def _trained(asked: Asked, reply: Trained) -> None:
    """`step` and `version` are those of the command. `metrics` are finite numbers, from a model group's first trainer.

    `gpus` are readings that `tandem.observe.exporters.nvml` makes.
    """
    same(asked, reply, "step")
    must(reply.version == asked.command.step, "version", reply.version, f"the step, {asked.command.step}")
    speakers = asked.limits.speakers
    is_empty = asked.name in speakers or not reply.metrics
    must(is_empty, "metrics", reply.metrics, f"empty: {' and '.join(sorted(speakers))} has them")
    finite(reply.metrics)
    if reply.gpus:
        measured(reply.gpus)


def _samples_missing(asked: Asked, reply: SamplesMissing) -> None:
    """`step` is that of the command. `rollouts` are sources of the command."""
    same(asked, reply, "step")
    all_among("rollouts", reply.rollouts, {*asked.command.sources})


def _evaluated(asked: Asked, reply: Evaluated) -> None:
    """`step` is that of the command. `metrics` are finite numbers."""
    same(asked, reply, "step")
    finite(reply.metrics)


def _gradient_added(asked: Asked, reply: GradientAdded) -> None:
    """`loss` is a finite number, and `logprobs` are whole numbers of 4 bytes."""
    must(math.isfinite(reply.loss), "loss", reply.loss, "a finite number")
    must(len(reply.logprobs) % 4 == 0, "logprobs", f"{len(reply.logprobs)} bytes", "numbers of 4 bytes")


def _optimizer_stepped(asked: Asked, reply: OptimizerStepped) -> None:
    """`grad_norm` is a finite number."""
    must(math.isfinite(reply.grad_norm), "grad_norm", reply.grad_norm, "a finite number")


def _samples_finished(asked: Asked, reply: SamplesFinished) -> None:
    """`step` and `purpose` are those of the command; each sample was asked for, and is in a message once.

    Its prompt has the requested length; its response is within the limits of the command, of
    `policy.max_total_sequence_length` and of `grpo.max_rollout_turns`. Its versions are among those that the engine has
    held since it got the command, and its tokens are counted by version. Only validation samples have text.
    """
    same(asked, reply, "step", "purpose")
    check_samples(asked, reply.samples)
    versions = asked.state.versions
    held = versions[bisect.bisect_left(versions, asked.oldest_version) :]
    for row, sample in enumerate(reply.samples):
        for field in ("oldest_version", "newest_version"):
            if getattr(sample, field) not in held:
                fits(False, row, field, sample, f"one that the engine held then: {some(held)}")
        oldest, newest = sample.oldest_version, sample.newest_version
        fits(oldest <= newest, row, "oldest_version", sample, "at most the newest, {}", newest)
        counts = sample.tokens_by_version
        made = sample.response_length
        is_counted = len(counts) == newest - oldest + 1 and sum(counts) == made
        fits(is_counted, row, "tokens_by_version", sample, "those of the response, {}, by version", made)
        has_text = bool(sample.response) and reply.purpose == "train"
        fits(not has_text, row, "response", sample, "empty: only validation has text")
        if (sample.group, sample.sample) not in asked.arrived:  # a command that is sent again is answered again
            asked.arrived.add((sample.group, sample.sample))
            asked.num_tokens += made


def _generated(asked: Asked, reply: Generated) -> None:
    """`step` and `purpose` are those of the command. All `num_samples` samples were sent, with `num_tokens` tokens.

    `gpus` are readings that `tandem.observe.exporters.nvml` makes.
    """
    same(asked, reply, "step", "purpose")
    _check_whole(asked, reply, sum(len(group.seeds) for group in asked.command.groups))
    must(reply.num_tokens == asked.num_tokens, "num_tokens", reply.num_tokens, f"{asked.num_tokens}, as were sent")
    if reply.gpus:
        measured(reply.gpus)


def _samples_restored(asked: Asked, reply: SamplesFinished) -> None:
    """`step` is that of the command; each sample's group was asked for, and it is in a message once.

    No group has more samples than it should. None is longer than `policy.max_total_sequence_length`, and none has text.
    """
    same(asked, reply, "step")
    must(reply.purpose == "train", "purpose", reply.purpose, "train")
    groups = {group for keys in asked.command.files.values() for _, group in keys}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(reply.samples):
        fits(sample.group in groups, row, "group", sample, "one that was asked for")
        fits(sample.sample < asked.command.num_samples, row, "sample", sample, "below {}", asked.command.num_samples)
        fits((sample.group, sample.sample) not in seen, row, "sample", sample, "in the message once")
        most = asked.limits.max_tokens
        if sample.branches:
            check_branches(asked.limits, row, sample)
        else:
            fits(sample.num_tokens <= most, row, "num_tokens", sample, "at most {}", most)
        made = sample.prompt_length + sample.response_length
        fits(made <= sample.num_tokens, row, "num_tokens", sample, "at least {}", made)
        fits(sample.oldest_version <= sample.newest_version, row, "oldest_version", sample, "at most the newest")
        fits(not sample.response, row, "response", sample, "empty: only validation has text")
        seen.add((sample.group, sample.sample))
    asked.arrived |= seen


def _all_restored(asked: Asked, reply: Generated) -> None:
    """`step` is that of the command. All `num_samples` samples were sent, and no token was generated for them."""
    same(asked, reply, "step")
    must(reply.purpose == "train", "purpose", reply.purpose, "train")
    _check_whole(asked, reply, asked.command.num_samples * sum(map(len, asked.command.files.values())))
    must(reply.num_tokens == 0, "num_tokens", reply.num_tokens, "0: none was made")


def _check_whole(asked: Asked, reply: Generated, wanted: int) -> None:
    """Raise `WireError` unless all samples of a request were sent, and are counted."""
    must(len(asked.arrived) == wanted, "command_id", reply.command_id, f"of a command whose {wanted} samples were sent")
    must(reply.num_samples == wanted, "num_samples", reply.num_samples, f"{wanted}, as asked for")


def _samples_recorded(asked: Asked, reply: SamplesRecorded) -> None:
    """`step` is that of the command. Written and missing samples add up to those asked for."""
    same(asked, reply, "step")
    wanted = sum(len(group.advantages) for group in asked.command.groups)
    must(reply.num_missing <= wanted, "num_missing", reply.num_missing, f"at most {wanted}, as asked for")
    rest = wanted - reply.num_missing
    must(reply.num_samples == rest, "num_samples", reply.num_samples, f"{rest}, all but the missing ones")


def _refitted(asked: Asked, reply: Refitted) -> None:
    """`version` is that of the command. `num_bytes` are of links with this process at one end."""
    same(asked, reply, "version")
    for link in reply.num_bytes:
        ends = [process_of(end) for end in link.split(">")]
        must(len(ends) == 2 and asked.name in ends, "num_bytes", link, f"a link of {asked.name}")
    if asked.name in asked.command.only or not asked.command.only:
        asked.state.version = reply.version


def _verified(asked: Asked, reply: DigestsReported) -> None:
    """`version` is that of the command. `digests` are of every worker shard, 8 bytes for each tensor of its layout."""
    same(asked, reply, "version")
    check_digests(asked, reply.digests)


def _weights_copied(asked: Asked, reply: WeightsCopied) -> None:
    """`version` is that of the command. `digests` are as in an `DigestsReported` if they were asked for, else empty."""
    same(asked, reply, "version")
    if asked.command.with_digests:
        check_digests(asked, reply.digests)
    else:
        must(not reply.digests, "digests", len(reply.digests), "none, since they were not asked for")


def _version_committed(asked: Asked, reply: VersionCommitted) -> None:
    """`version` is that of the command. `differing` are engines with digests in the command."""
    same(asked, reply, "version")
    if reply.differing:
        processes = {process_of(part) for part in asked.command.digests}
        all_among("differing", reply.differing, {name for name in processes if not name.startswith("trainer-")})


RULES: Mapping[type[Message], tuple[Rule, ...]] = {
    RendezvousOpened: (Rule(OpenRendezvous, None),),
    TrainerBuilt: (Rule(BuildTrainer, setting_up.trainer_built),),
    Trained: (Rule(Train, _trained),),
    SamplesMissing: (Rule(Train, _samples_missing),),
    Evaluated: (Rule(Evaluate, _evaluated),),
    CheckpointCopied: (Rule(SaveCheckpoint, None),),
    CheckpointSaved: (Rule(AwaitCheckpoint, None),),
    WeightsCopied: (Rule(CopyWeights, _weights_copied),),
    GradientAdded: (Rule(AddGradient, _gradient_added),),
    OptimizerStepped: (Rule(StepOptimizer, _optimizer_stepped),),
    TrainingRestored: (Rule(RestoreTraining, None), Rule(SwitchTraining, None)),
    EngineBuilt: (Rule(BuildEngine, setting_up.engine_built),),
    SamplesFinished: (Rule(Generate, _samples_finished), Rule(RestoreSamples, _samples_restored)),
    Generated: (Rule(Generate, _generated), Rule(RestoreSamples, _all_restored)),
    SamplesRecorded: (Rule(RecordSamples, _samples_recorded),),
    ProgramInstalled: (Rule(InstallProgram, setting_up.program_installed),),
    TransferGroupConnected: (Rule(ConnectTransferGroup, setting_up.mesh_connected),),
    Refitted: (Rule(Refit, _refitted),),
    DigestsReported: (Rule(ReportDigests, _verified),),
    TransfersPlanned: (Rule(PlanTransfers, setting_up.transfers_planned),),
    VersionCommitted: (Rule(CommitVersion, _version_committed),),
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
