"""The check of replies against their requests; pure, no sockets and no clock.

`Replies` is told of every request that is sent (`expect`) and of every process that is lost (`forget`). Every reply
passes `take` before it becomes an event. A reply that cannot answer its request thus never reaches a batch, a metric or
the journal.

Decoding has already checked each field by itself (the types in `tandem.common.messages`). Here fields are compared with
the request, by one check for each message (`CHECKS`). ``docs/protocol.md`` lists the docstrings of the checks
(``scripts/protocol_page.py``).
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tandem.common import messages
from tandem.common.errors import RefitError, WireError
from tandem.common.wire import Arrays
from tandem.common.worker_shards import process_of
from tandem.config import Config
from tandem.config.models.model_sizes import vocabulary_size
from tandem.config.placement import list_model_groups
from tandem.observe.exporters.nvml import MEASURED
from tandem.refit import layout, program

_ADDRESS = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}")
_DIGEST_BYTES = 8
"""Bytes of the digest of a tensor."""
SHOWN = 100
"""Most characters of a value that an error shows."""


class SampleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of every sample of a run."""

    vocabulary: int
    max_tokens: int
    """Most tokens of a whole sequence."""
    max_turns: int
    num_roles: int = 0
    """Roles that the policy plays in an agent's episode; zero where requests name none."""
    plays: bool = False
    """Whether an agent plays episodes, with prompts of its own."""
    speakers: frozenset[str] = frozenset({"trainer-0"})
    """Trainers that report the run's metrics: the first of each model group."""

    @staticmethod
    def of(config: Config) -> SampleLimits:
        """Return the limits of a run; its model folder must exist."""
        policy = config.policy
        agent = config.agent
        turns = config.rollout_section.max_rollout_turns if config.declaration.rolls_out else 0
        if agent is not None:
            turns = agent.max_completions
        vocabulary = vocabulary_size(policy)
        return SampleLimits(
            vocabulary=vocabulary,
            max_tokens=policy.generation.kind.longest_sequence(config),
            max_turns=turns,
            num_roles=0 if agent is None else len(agent.roles),
            plays=agent is not None,
            speakers=frozenset(f"trainer-{model_group.first}" for model_group in list_model_groups(config)),
        )


class KnownState(msgspec.Struct):
    """The state of a process as its requests and replies tell it."""

    digest_sizes: tuple[int, ...] = ()
    """Bytes of the digests of its shards, for each as its layout has tensors."""
    versions: list[int] = []
    """Versions that it was given and may still answer with, in ascending order."""
    version: int = 0
    """Version that it last reported."""


class UnansweredRequest(msgspec.Struct, kw_only=True):
    """A request without a complete answer."""

    name: str
    command: Any
    """Request of the type that the check of the reply takes."""
    state: KnownState
    limits: SampleLimits
    oldest_version: int
    """Oldest version with which the process may generate for this request."""
    arrived: set[tuple[int, int]] = msgspec.field(default_factory=set)
    """Samples received so far, by group and index."""
    num_tokens: int = 0
    """Number of generated tokens in these samples."""


# --- checks ----------------------------------------------------------------------------------------------------------


def check_trained(request: UnansweredRequest, reply: messages.Trained) -> None:
    """`step` and `version` are those of the command. `metrics` are finite numbers, from a model group's first trainer.

    `gpus` are readings that `tandem.observe.exporters.nvml` makes.
    """
    require_same(request, reply, "step")
    require(reply.version == request.command.step, "version", reply.version, f"the step, {request.command.step}")
    speakers = request.limits.speakers
    is_empty = request.name in speakers or not reply.metrics
    require(is_empty, "metrics", reply.metrics, f"empty: {' and '.join(sorted(speakers))} has them")
    require_finite(reply.metrics)
    if reply.gpus:
        _require_readings(reply.gpus)


def check_samples_finished(request: UnansweredRequest, reply: messages.SamplesFinished) -> None:
    """`step` and `purpose` are those of the command; each sample was asked for, and is in a message once.

    Its prompt has the requested length; its response is within the limits of the command, of
    `policy.max_total_sequence_length` and of `grpo.max_rollout_turns`. Its versions are among those that the engine has
    held since it got the command, and its tokens are counted by version. Only validation samples have text.
    """
    require_same(request, reply, "step", "purpose")
    _check_samples(request, reply.samples)
    versions = request.state.versions
    possible = versions[bisect.bisect_left(versions, request.oldest_version) :]
    for row, sample in enumerate(reply.samples):
        for field in ("oldest_version", "newest_version"):
            if getattr(sample, field) not in possible:
                expect(False, row, field, sample, f"one that the engine held then: {_some(possible)}")
        oldest, newest = sample.oldest_version, sample.newest_version
        expect(oldest <= newest, row, "oldest_version", sample, "at most the newest, {}", newest)
        counts = sample.tokens_by_version
        length = sample.response_length
        is_counted = len(counts) == newest - oldest + 1 and sum(counts) == length
        expect(is_counted, row, "tokens_by_version", sample, "those of the response, {}, by version", length)
        has_text = bool(sample.response) and reply.purpose == "train"
        expect(not has_text, row, "response", sample, "empty: only validation has text")
        if (sample.group, sample.sample) not in request.arrived:  # a command that is sent again is answered again
            request.arrived.add((sample.group, sample.sample))
            request.num_tokens += length


def _check_samples(request: UnansweredRequest, samples: Iterable[messages.SampleScored]) -> None:
    """Compare the sizes of each sample with its request."""
    command: messages.Generate = request.command
    limits, groups = request.limits, {group.group: group for group in command.groups}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(samples):
        group = groups.get(sample.group)
        if group is None:
            raise WireError(f"samples[{row}].group: {sample.group}, must be one that was asked for")
        prompt, response, turns = len(group.prompt_ids), sample.response_length, sample.num_turns
        expect(sample.sample < len(group.seeds), row, "sample", sample, "below {}", len(group.seeds))
        expect((sample.group, sample.sample) not in seen, row, "sample", sample, "in the message once")
        seen.add((sample.group, sample.sample))
        if limits.plays and response:
            _check_episode(request, row, sample)
            continue
        expect(not sample.branches, row, "branches", sample, "none: no agent has asked for anything")
        expect(turns >= 1 or limits.plays or bool(sample.failure), row, "num_turns", sample, "at least 1")
        expect(sample.prompt_length == prompt, row, "prompt_length", sample, "{}, as asked for", prompt)
        expect(turns <= limits.max_turns, row, "num_turns", sample, "at most {}", limits.max_turns)
        max_response = min(turns * command.sampling.max_new_tokens, limits.max_tokens - prompt)
        expect(turns <= response <= max_response, row, "response_length", sample, "from {} to {}", turns, max_response)
        length = sample.num_tokens
        expect(length <= limits.max_tokens, row, "num_tokens", sample, "at most {}", limits.max_tokens)
        # An environment inserts text between two responses.
        is_all = length == prompt + response if turns <= 1 else length >= prompt + response
        expect(is_all, row, "num_tokens", sample, "that of the prompt, {}, and what follows, {}", prompt, response)
        can_end = sample.finish_reason != "turns" or turns == limits.max_turns
        expect(can_end, row, "finish_reason", sample, "another after {} of {}", turns, limits.max_turns)


def check_generated(request: UnansweredRequest, reply: messages.Generated) -> None:
    """`step` and `purpose` are those of the command. All `num_samples` samples were sent, with `num_tokens` tokens.

    `gpus` are readings that `tandem.observe.exporters.nvml` makes.
    """
    require_same(request, reply, "step", "purpose")
    require_whole(request, reply, sum(len(group.seeds) for group in request.command.groups))
    require(
        reply.num_tokens == request.num_tokens, "num_tokens", reply.num_tokens, f"{request.num_tokens}, as were sent"
    )
    if reply.gpus:
        _require_readings(reply.gpus)


def check_samples_recorded(request: UnansweredRequest, reply: messages.SamplesRecorded) -> None:
    """`step` is that of the command. Written and missing samples add up to those asked for."""
    require_same(request, reply, "step")
    expected = sum(len(group.advantages) for group in request.command.groups)
    require(reply.num_missing <= expected, "num_missing", reply.num_missing, f"at most {expected}, as asked for")
    num_written = expected - reply.num_missing
    require(
        reply.num_samples == num_written, "num_samples", reply.num_samples, f"{num_written}, all but the missing ones"
    )


def check_refitted(request: UnansweredRequest, reply: messages.Refitted) -> None:
    """`version` is that of the command. `num_bytes` are of links with this process at one end."""
    require_same(request, reply, "version")
    for link in reply.num_bytes:
        ends = [*map(process_of, link.split(">"))]
        require(len(ends) == 2 and request.name in ends, "num_bytes", link, f"a link of {request.name}")
    if request.name in request.command.only or not request.command.only:
        request.state.version = reply.version


def check_digests_reported(request: UnansweredRequest, reply: messages.DigestsReported) -> None:
    """`version` is that of the command. `digests` are of every worker shard, 8 bytes for each tensor of its layout."""
    require_same(request, reply, "version")
    check_digests(request, reply.digests)


def check_version_committed(request: UnansweredRequest, reply: messages.VersionCommitted) -> None:
    """`version` is that of the command. `differing` are engines with digests in the command."""
    require_same(request, reply, "version")
    if reply.differing:
        processes = {process_of(part) for part in request.command.digests}
        require_among("differing", reply.differing, {name for name in processes if not name.startswith("trainer-")})


# --- what is asked now and then: to restore, evaluate, copy, or call a trainer ----------------------------------------


def check_samples_missing(request: UnansweredRequest, reply: messages.SamplesMissing) -> None:
    """`step` is that of the command. `rollouts` are sources of the command."""
    require_same(request, reply, "step")
    require_among("rollouts", reply.rollouts, {*request.command.sources})


def check_groups_streamed(request: UnansweredRequest, reply: messages.GroupsStreamed) -> None:
    """`step` is that of the command."""
    require_same(request, reply, "step")


def check_evaluated(request: UnansweredRequest, reply: messages.Evaluated) -> None:
    """`step` is that of the command. `metrics` are finite numbers."""
    require_same(request, reply, "step")
    require_finite(reply.metrics)


def check_gradient_added(request: UnansweredRequest, reply: messages.GradientAdded) -> None:
    """`loss` is a finite number, and `logprobs` are whole numbers of 4 bytes."""
    require(math.isfinite(reply.loss), "loss", reply.loss, "a finite number")
    require(len(reply.logprobs) % 4 == 0, "logprobs", f"{len(reply.logprobs)} bytes", "numbers of 4 bytes")


def check_optimizer_stepped(request: UnansweredRequest, reply: messages.OptimizerStepped) -> None:
    """`grad_norm` is a finite number."""
    require(math.isfinite(reply.grad_norm), "grad_norm", reply.grad_norm, "a finite number")


def check_samples_restored(request: UnansweredRequest, reply: messages.SamplesFinished) -> None:
    """`step` is that of the command; each sample's group was asked for, and it is in a message once.

    No group has more samples than it should. None is longer than `policy.max_total_sequence_length`, and none has text.
    """
    require_same(request, reply, "step")
    require(reply.purpose == "train", "purpose", reply.purpose, "train")
    groups = {group for keys in request.command.files.values() for _, group in keys}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(reply.samples):
        expect(sample.group in groups, row, "group", sample, "one that was asked for")
        expect(
            sample.sample < request.command.num_samples, row, "sample", sample, "below {}", request.command.num_samples
        )
        expect((sample.group, sample.sample) not in seen, row, "sample", sample, "in the message once")
        max_tokens = request.limits.max_tokens
        if sample.branches:
            check_branches(request.limits, row, sample)
        else:
            expect(sample.num_tokens <= max_tokens, row, "num_tokens", sample, "at most {}", max_tokens)
        length = sample.prompt_length + sample.response_length
        expect(length <= sample.num_tokens, row, "num_tokens", sample, "at least {}", length)
        expect(sample.oldest_version <= sample.newest_version, row, "oldest_version", sample, "at most the newest")
        expect(not sample.response, row, "response", sample, "empty: only validation has text")
        seen.add((sample.group, sample.sample))
    request.arrived |= seen


def check_all_restored(request: UnansweredRequest, reply: messages.Generated) -> None:
    """`step` is that of the command. All `num_samples` samples were sent, and no token was generated for them."""
    require_same(request, reply, "step")
    require(reply.purpose == "train", "purpose", reply.purpose, "train")
    require_whole(request, reply, request.command.num_samples * sum(map(len, request.command.files.values())))
    require(reply.num_tokens == 0, "num_tokens", reply.num_tokens, "0: none was made")


def check_weights_copied(request: UnansweredRequest, reply: messages.WeightsCopied) -> None:
    """`version` is that of the command. `digests` are as in an `DigestsReported` if they were asked for, else empty."""
    require_same(request, reply, "version")
    if request.command.with_digests:
        check_digests(request, reply.digests)
    else:
        require(not reply.digests, "digests", len(reply.digests), "none, since they were not asked for")


# --- while a run is set up: what is built, installed, planned and connected -------------------------------------------


def check_trainer_built(request: UnansweredRequest, reply: messages.TrainerBuilt) -> None:
    """`version` is that of the command, and `layout` can be read."""
    require_same(request, reply, "version")
    request.state.digest_sizes = (_digest_size_of("layout", reply.layout),)


def check_engine_built(request: UnansweredRequest, reply: messages.EngineBuilt) -> None:
    """`layouts` can be read. The address of `samples_at` is ``tcp://HOST:PORT``, `external_requests.url` ``http://HOST:PORT``."""
    address = reply.samples_at.address
    require(_ADDRESS.fullmatch(address) is not None, "samples_at.address", address, "tcp://HOST:PORT")
    external_requests = "http://h:1" if reply.external_requests is None else reply.external_requests.url
    require(
        _ADDRESS.fullmatch(external_requests.replace("http", "tcp", 1)) is not None,
        "external_requests.url",
        external_requests,
        "http://HOST:PORT",
    )
    request.state.digest_sizes = tuple(_digest_size_of(f"layouts[{i}]", each) for i, each in enumerate(reply.layouts))


def check_program_installed(request: UnansweredRequest, reply: messages.ProgramInstalled) -> None:
    """From then on, digests cover the tensors that its programs receive, if those are not its layout."""
    command: messages.InstallProgram = request.command
    received = map(program.num_received, command.programs)
    sizes = zip(request.state.digest_sizes, received, strict=False)
    request.state.digest_sizes = tuple(size if num is None else _DIGEST_BYTES * num for size, num in sizes)


def check_transfer_group_connected(request: UnansweredRequest, reply: messages.TransferGroupConnected) -> None:
    """`transfer_group` is that of the command."""
    require_same(request, reply, "transfer_group")


def check_transfers_planned(request: UnansweredRequest, reply: messages.TransfersPlanned) -> None:
    """There is a program for every worker shard with a layout in the command, and for no other.

    Senders are processes of these shards. Transfer groups have different names; groups and links connect these shards.
    """
    parts = {*request.command.sources, *request.command.destinations}
    processes = {process_of(part) for part in parts}
    require_among("programs", reply.programs, parts)
    require_among("programs", parts, {*reply.programs}, "one of those that have a program")
    require_among("senders", reply.senders, processes)
    names = [transfer_group.name for transfer_group in reply.transfer_groups]
    require(len({*names}) == len(names), "transfer_groups", names, "of different names")
    for transfer_group in reply.transfer_groups:
        require_among(f"transfer_groups[{transfer_group.name!r}]", transfer_group.members, parts)
    for link in reply.num_bytes:
        require(link.count(">") == 1, "num_bytes", link, "a link, such as trainer-0>rollout-0")
        require_among("num_bytes", link.split(">"), parts)


def _digest_size_of(field: str, encoded: bytes) -> int:
    """Return the bytes of the digests of a layout's tensors. Raise `WireError` if it cannot be read."""
    try:
        return _DIGEST_BYTES * layout.num_tensors(encoded)
    except RefitError as error:
        raise WireError(f"{field}: {error}") from error


# --- the samples of agents, which play episodes with prompts of their own --------------------------------------------


def _check_episode(request: UnansweredRequest, row: int, sample: messages.SampleScored) -> None:
    """Compare the sizes of an agent's episode with each other and with its request; its prompts are its own."""
    limits, turns, response = request.limits, sample.num_turns, sample.response_length
    expect(1 <= turns <= limits.max_turns, row, "num_turns", sample, "from 1 to {}", limits.max_turns)
    max_response = turns * request.command.sampling.max_new_tokens
    expect(turns <= response <= max_response, row, "response_length", sample, "from {} to {}", turns, max_response)
    expect(1 <= len(sample.branches) <= turns, row, "branches", sample, "from 1 to {}", turns)
    check_branches(limits, row, sample)
    expect(sample.finish_reason != "turns", row, "finish_reason", sample, "another: agents have no limit of turns")


def check_branches(limits: SampleLimits, row: int, sample: messages.SampleScored) -> None:
    """Compare the sizes of an agent's episode with each other."""
    num_roles, num_branches = limits.num_roles, len(sample.branches) if limits.num_roles else 0
    has_roles = len(sample.roles) == num_branches and all(role < num_roles for role in sample.roles)
    expect(has_roles, row, "roles", sample, "one of {} for each branch", num_roles)
    expect(len(sample.role_rewards) == num_roles, row, "role_rewards", sample, "{} of them", num_roles)
    for branch in sample.branches:
        is_whole = branch.prompt_length + branch.num_made <= branch.num_tokens <= limits.max_tokens
        expect(is_whole, row, "branches", sample, "at most {} tokens each, and at least what counts", limits.max_tokens)
    num_made, num_tokens = (sum(getattr(b, name) for b in sample.branches) for name in ("num_made", "num_tokens"))
    expect(num_made == sample.response_length, row, "response_length", sample, "that of the branches, {}", num_made)
    expect(num_tokens == sample.num_tokens, row, "num_tokens", sample, "that of the branches, {}", num_tokens)
    first = sample.branches[0].prompt_length
    expect(first == sample.prompt_length, row, "prompt_length", sample, "that of the first branch, {}", first)


# --- comparisons -----------------------------------------------------------------------------------------------------


def check_digests(request: UnansweredRequest, digests: tuple[bytes, ...]) -> None:
    """Compare the sizes of digests with those of their layouts."""
    sizes, expected = tuple(map(len, digests)), request.state.digest_sizes
    if sizes != expected:
        requirement = f"{_some(expected)}: 8 for each tensor of a part's layout"
        require(False, "digests", f"{_some(sizes)} bytes", requirement)


def expect(holds: bool, row: int, field: str, sample: messages.SampleScored, requirement: str, *values: int) -> None:
    """Raise `WireError` unless a condition on a sample's field holds; format the text only then."""
    if not holds:
        require(False, f"samples[{row}].{field}", getattr(sample, field), requirement.format(*values))


def require(holds: bool, field: str, value: object, requirement: str) -> None:
    """Raise `WireError` unless a condition on a field holds."""
    if not holds:
        shown = value if isinstance(value, str) else repr(value)
        raise WireError(f"{field}: {shown[:SHOWN]}, must be {requirement}")


def require_same(request: UnansweredRequest, reply: object, *fields: str) -> None:
    """Compare fields that a reply repeats from its request."""
    for field in fields:
        value, expected = getattr(reply, field), getattr(request.command, field)
        require(value == expected, field, value, f"{expected}, as in the command")


def require_finite(metrics: Mapping[str, float]) -> None:
    """Raise `WireError` unless all metrics are finite numbers."""
    for name, value in metrics.items():
        require(math.isfinite(value), f"metrics[{name!r}]", value, "a finite number")


def _require_readings(gpus: Mapping[str, float]) -> None:
    """Raise `WireError` unless GPU readings have known names, since they become metrics, and are finite."""
    require_among("gpus", gpus, {*MEASURED}, f"one of {', '.join(MEASURED)}")
    for name, value in gpus.items():
        require(math.isfinite(value), f"gpus[{name!r}]", value, "a finite number")


def require_among(
    field: str, names: Iterable[str], among: set[str], requirement: str = "one of those in the command"
) -> None:
    """Raise `WireError` unless each name is among those that a field may hold."""
    for name in names:
        require(name in among, field, name, requirement)


def _some(values: Iterable[object]) -> str:
    """Return values on one line of limited length."""
    return ", ".join(map(str, values))[-SHOWN:] or "none"


def require_whole(request: UnansweredRequest, reply: messages.Generated, num_expected: int) -> None:
    """Raise `WireError` unless all samples of a request were sent, and are counted."""
    require(
        len(request.arrived) == num_expected,
        "command_id",
        reply.command_id,
        f"of a command whose {num_expected} samples were sent",
    )
    require(reply.num_samples == num_expected, "num_samples", reply.num_samples, f"{num_expected}, as asked for")


Check = Callable[[UnansweredRequest, Any], None]
"""A comparison of a reply with its request. It raises `WireError` if the one cannot answer the other."""

CHECKS: Mapping[type[messages.Message], Mapping[type[messages.Command], Check | None]] = {
    messages.RendezvousOpened: {messages.OpenRendezvous: None},
    messages.TrainerBuilt: {messages.BuildTrainer: check_trainer_built},
    messages.Trained: {messages.Train: check_trained},
    messages.SamplesMissing: {messages.Train: check_samples_missing},
    messages.GroupsStreamed: {messages.StreamGroups: check_groups_streamed},
    messages.Evaluated: {messages.Evaluate: check_evaluated},
    messages.CheckpointCopied: {messages.SaveCheckpoint: None},
    messages.CheckpointSaved: {messages.AwaitCheckpoint: None},
    messages.WeightsCopied: {messages.CopyWeights: check_weights_copied},
    messages.GradientAdded: {messages.AddGradient: check_gradient_added},
    messages.OptimizerStepped: {messages.StepOptimizer: check_optimizer_stepped},
    messages.TrainingRestored: {
        messages.RestoreTraining: None,
        messages.SwitchTraining: None,
        messages.KeepWeights: None,
    },
    messages.EngineBuilt: {messages.BuildEngine: check_engine_built},
    messages.SamplesFinished: {
        messages.Generate: check_samples_finished,
        messages.RestoreSamples: check_samples_restored,
    },
    messages.Generated: {
        messages.Generate: check_generated,
        messages.RestoreSamples: check_all_restored,
    },
    messages.SamplesRecorded: {messages.RecordSamples: check_samples_recorded},
    messages.ProgramInstalled: {messages.InstallProgram: check_program_installed},
    messages.TransferGroupConnected: {messages.ConnectTransferGroup: check_transfer_group_connected},
    messages.Refitted: {messages.Refit: check_refitted},
    messages.DigestsReported: {messages.ReportDigests: check_digests_reported},
    messages.TransfersPlanned: {messages.PlanTransfers: check_transfers_planned},
    messages.VersionCommitted: {messages.CommitVersion: check_version_committed},
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

    def expect(self, name: str, command: messages.AnyCommand) -> None:
        """Note a request that is sent to a process, whose replies are checked against it."""
        self._newest = max(self._newest, command.command_id)
        if isinstance(command, messages.BuildEngine):  # it begins anew, without any version
            self._states[name] = KnownState()
        state = self._states.setdefault(name, KnownState())
        match command:
            case messages.Refit() if name in command.only or not command.only:
                if command.version not in state.versions[-1:]:
                    # Versions with which it can answer nothing any more are dropped: a run may have millions.
                    oldest_version = state.version
                    for request in self._requests.values():
                        if request.name == name:
                            oldest_version = min(oldest_version, request.oldest_version)
                    del state.versions[: bisect.bisect_left(state.versions, oldest_version)]
                    bisect.insort(state.versions, command.version)
            case messages.Generate() | messages.ReportDigests():  # the requests that this cancels are never answered
                oldest = command.cancel_before if isinstance(command, messages.Generate) else command.command_id
                for i, request in [*self._requests.items()]:
                    if request.name == name and type(request.command) is type(command) and i < oldest:
                        del self._requests[i]
            case _:
                pass
        self._requests[command.command_id] = UnansweredRequest(
            name=name, command=command, state=state, limits=self._limits, oldest_version=state.version
        )

    def forget(self, name: str) -> None:
        """Expect nothing more of a process; another of its name begins anew."""
        self._requests = {i: request for i, request in self._requests.items() if request.name != name}
        self._states.pop(name, None)

    def forget_commands(self) -> None:
        """Accept no more answers to earlier requests."""
        self._requests = {}

    def take(self, name: str, reply: messages.Reply | messages.Failed, arrays: Arrays) -> bool:
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
            if not isinstance(reply, messages.Failed):
                checks, command = CHECKS[type(reply)], type(request.command)
                if command not in checks:
                    require(False, "command_id", reply.command_id, _describe_answerable(type(reply), command))
                elif (check := checks[command]) is not None:
                    check(request, reply)
            for array in arrays:
                raise WireError(f"{array[:SHOWN]}: arrays came with a message that has none")
        except WireError as error:
            raise WireError(f"{type(reply).__name__}.{error}") from error
        if isinstance(reply, messages.SamplesFinished):
            return True  # more answers follow
        del self._requests[reply.command_id]
        return True


def _describe_answerable(message: type[messages.Message], command: type[messages.Command]) -> str:
    """Describe, for an error, the requests that a message answers instead of this one."""
    names = " or a ".join(each.__name__ for each in CHECKS[message])
    return f"of a {names}, not of a {command.__name__}"


def describe_checks(message: type[messages.Message]) -> str:
    """Describe the checks of a message as an answer, for the protocol's page; empty if it is none."""
    sentences = [
        f"Answers `{command.__name__}`. {(check.__doc__ if check is not None else '') or ''}"
        for command, check in CHECKS.get(message, {}).items()
    ]
    return " ".join(sentences)
