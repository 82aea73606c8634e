"""The checks of replies: each compares a reply with its request; ``docs/protocol.md`` lists them.

Here are requests as they are remembered, comparisons that raise, and the checks that a step of every run has. Those
that are rarer are in `occasional_checks` and `setting_up_checks`, and `reply_table` has all of them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tandem.common.errors import WireError
from tandem.common.messages import (
    DigestsReported,
    Generate,
    Generated,
    Refitted,
    SampleScored,
    SamplesFinished,
    SamplesRecorded,
    Trained,
    VersionCommitted,
)
from tandem.common.worker_shards import process_of
from tandem.coordinator.processes.sample_limits import SampleLimits
from tandem.observe.exporters.nvml import MEASURED

SHOWN = 100
"""Most characters of a value that an error shows."""


class KnownState(msgspec.Struct):
    """The state of a process as its requests and replies tell it."""

    num_tensors: tuple[int, ...] = ()
    """Numbers of tensors in the layouts of its shards."""
    versions: list[int] = []
    """Versions that it was given, in ascending order."""
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


def trained(request: UnansweredRequest, reply: Trained) -> None:
    """`step` and `version` are those of the command. `metrics` are finite numbers, from a model group's first trainer.

    `gpus` are readings that `tandem.observe.exporters.nvml` makes.
    """
    same(request, reply, "step")
    must(reply.version == request.command.step, "version", reply.version, f"the step, {request.command.step}")
    speakers = request.limits.speakers
    is_empty = request.name in speakers or not reply.metrics
    must(is_empty, "metrics", reply.metrics, f"empty: {' and '.join(sorted(speakers))} has them")
    finite(reply.metrics)
    if reply.gpus:
        _measured(reply.gpus)


def samples_finished(request: UnansweredRequest, reply: SamplesFinished) -> None:
    """`step` and `purpose` are those of the command; each sample was asked for, and is in a message once.

    Its prompt has the requested length; its response is within the limits of the command, of
    `policy.max_total_sequence_length` and of `grpo.max_rollout_turns`. Its versions are among those that the engine has
    held since it got the command, and its tokens are counted by version. Only validation samples have text.
    """
    same(request, reply, "step", "purpose")
    _check_samples(request, reply.samples)
    versions = request.state.versions
    possible = versions[bisect.bisect_left(versions, request.oldest_version) :]
    for row, sample in enumerate(reply.samples):
        for field in ("oldest_version", "newest_version"):
            if getattr(sample, field) not in possible:
                fits(False, row, field, sample, f"one that the engine held then: {_some(possible)}")
        oldest, newest = sample.oldest_version, sample.newest_version
        fits(oldest <= newest, row, "oldest_version", sample, "at most the newest, {}", newest)
        counts = sample.tokens_by_version
        length = sample.response_length
        is_counted = len(counts) == newest - oldest + 1 and sum(counts) == length
        fits(is_counted, row, "tokens_by_version", sample, "those of the response, {}, by version", length)
        has_text = bool(sample.response) and reply.purpose == "train"
        fits(not has_text, row, "response", sample, "empty: only validation has text")
        if (sample.group, sample.sample) not in request.arrived:  # a command that is sent again is answered again
            request.arrived.add((sample.group, sample.sample))
            request.num_tokens += length


def _check_samples(request: UnansweredRequest, samples: Iterable[SampleScored]) -> None:
    """Compare the sizes of each sample with its request."""
    command: Generate = request.command
    limits, groups = request.limits, {group.group: group for group in command.groups}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(samples):
        group = groups.get(sample.group)
        if group is None:
            raise WireError(f"samples[{row}].group: {sample.group}, must be one that was asked for")
        prompt, response, turns = len(group.prompt_ids), sample.response_length, sample.num_turns
        fits(sample.sample < len(group.seeds), row, "sample", sample, "below {}", len(group.seeds))
        fits((sample.group, sample.sample) not in seen, row, "sample", sample, "in the message once")
        seen.add((sample.group, sample.sample))
        if limits.plays and response:
            _check_episode(request, row, sample)
            continue
        fits(not sample.branches, row, "branches", sample, "none: no agent has asked for anything")
        fits(turns >= 1 or limits.plays or bool(sample.failure), row, "num_turns", sample, "at least 1")
        fits(sample.prompt_length == prompt, row, "prompt_length", sample, "{}, as asked for", prompt)
        fits(turns <= limits.max_turns, row, "num_turns", sample, "at most {}", limits.max_turns)
        max_response = min(turns * command.sampling.max_new_tokens, limits.max_tokens - prompt)
        fits(turns <= response <= max_response, row, "response_length", sample, "from {} to {}", turns, max_response)
        length = sample.num_tokens
        fits(length <= limits.max_tokens, row, "num_tokens", sample, "at most {}", limits.max_tokens)
        # An environment inserts text between two responses.
        is_all = length == prompt + response if turns <= 1 else length >= prompt + response
        fits(is_all, row, "num_tokens", sample, "that of the prompt, {}, and what follows, {}", prompt, response)
        can_end = sample.finish_reason != "turns" or turns == limits.max_turns
        fits(can_end, row, "finish_reason", sample, "another after {} of {}", turns, limits.max_turns)


def generated(request: UnansweredRequest, reply: Generated) -> None:
    """`step` and `purpose` are those of the command. All `num_samples` samples were sent, with `num_tokens` tokens.

    `gpus` are readings that `tandem.observe.exporters.nvml` makes.
    """
    same(request, reply, "step", "purpose")
    check_whole(request, reply, sum(len(group.seeds) for group in request.command.groups))
    must(reply.num_tokens == request.num_tokens, "num_tokens", reply.num_tokens, f"{request.num_tokens}, as were sent")
    if reply.gpus:
        _measured(reply.gpus)


def samples_recorded(request: UnansweredRequest, reply: SamplesRecorded) -> None:
    """`step` is that of the command. Written and missing samples add up to those asked for."""
    same(request, reply, "step")
    expected = sum(len(group.advantages) for group in request.command.groups)
    must(reply.num_missing <= expected, "num_missing", reply.num_missing, f"at most {expected}, as asked for")
    num_written = expected - reply.num_missing
    must(reply.num_samples == num_written, "num_samples", reply.num_samples, f"{num_written}, all but the missing ones")


def refitted(request: UnansweredRequest, reply: Refitted) -> None:
    """`version` is that of the command. `num_bytes` are of links with this process at one end."""
    same(request, reply, "version")
    for link in reply.num_bytes:
        ends = [process_of(end) for end in link.split(">")]
        must(len(ends) == 2 and request.name in ends, "num_bytes", link, f"a link of {request.name}")
    if request.name in request.command.only or not request.command.only:
        request.state.version = reply.version


def verified(request: UnansweredRequest, reply: DigestsReported) -> None:
    """`version` is that of the command. `digests` are of every worker shard, 8 bytes for each tensor of its layout."""
    same(request, reply, "version")
    check_digests(request, reply.digests)


def version_committed(request: UnansweredRequest, reply: VersionCommitted) -> None:
    """`version` is that of the command. `differing` are engines with digests in the command."""
    same(request, reply, "version")
    if reply.differing:
        processes = {process_of(part) for part in request.command.digests}
        all_among("differing", reply.differing, {name for name in processes if not name.startswith("trainer-")})


# --- the samples of agents, which play episodes with prompts of their own --------------------------------------------


def _check_episode(request: UnansweredRequest, row: int, sample: SampleScored) -> None:
    """Compare the sizes of an agent's episode with each other and with its request; its prompts are its own."""
    limits, turns, response = request.limits, sample.num_turns, sample.response_length
    fits(1 <= turns <= limits.max_turns, row, "num_turns", sample, "from 1 to {}", limits.max_turns)
    max_response = turns * request.command.sampling.max_new_tokens
    fits(turns <= response <= max_response, row, "response_length", sample, "from {} to {}", turns, max_response)
    fits(1 <= len(sample.branches) <= turns, row, "branches", sample, "from 1 to {}", turns)
    check_branches(limits, row, sample)
    fits(sample.finish_reason != "turns", row, "finish_reason", sample, "another: agents have no limit of turns")


def check_branches(limits: SampleLimits, row: int, sample: SampleScored) -> None:
    """Compare the sizes of an agent's episode with each other."""
    for branch in sample.branches:
        is_whole = branch.prompt_length + branch.num_made <= branch.num_tokens <= limits.max_tokens
        fits(is_whole, row, "branches", sample, "at most {} tokens each, and at least what counts", limits.max_tokens)
    num_made, num_tokens = (sum(getattr(b, name) for b in sample.branches) for name in ("num_made", "num_tokens"))
    fits(num_made == sample.response_length, row, "response_length", sample, "that of the branches, {}", num_made)
    fits(num_tokens == sample.num_tokens, row, "num_tokens", sample, "that of the branches, {}", num_tokens)
    first = sample.branches[0].prompt_length
    fits(first == sample.prompt_length, row, "prompt_length", sample, "that of the first branch, {}", first)


# --- comparisons -----------------------------------------------------------------------------------------------------


def check_digests(request: UnansweredRequest, digests: tuple[bytes, ...]) -> None:
    """Compare the sizes of digests with those of their layouts."""
    sizes = tuple(map(len, digests))
    expected = tuple(8 * num for num in request.state.num_tensors)
    if sizes != expected:
        requirement = f"{_some(expected)}: 8 for each tensor of a part's layout"
        must(False, "digests", f"{_some(sizes)} bytes", requirement)


def fits(holds: bool, row: int, field: str, sample: SampleScored, requirement: str, *values: int) -> None:
    """Raise `WireError` unless a condition on a sample's field holds; format the text only then."""
    if not holds:
        must(False, f"samples[{row}].{field}", getattr(sample, field), requirement.format(*values))


def must(holds: bool, field: str, value: object, requirement: str) -> None:
    """Raise `WireError` unless a condition on a field holds."""
    if not holds:
        shown = value if isinstance(value, str) else repr(value)
        raise WireError(f"{field}: {shown[:SHOWN]}, must be {requirement}")


def same(request: UnansweredRequest, reply: object, *fields: str) -> None:
    """Compare fields that a reply repeats from its request."""
    for field in fields:
        value, expected = getattr(reply, field), getattr(request.command, field)
        must(value == expected, field, value, f"{expected}, as in the command")


def finite(metrics: Mapping[str, float]) -> None:
    """Raise `WireError` unless all metrics are finite numbers."""
    for name, value in metrics.items():
        must(math.isfinite(value), f"metrics[{name!r}]", value, "a finite number")


def _measured(gpus: Mapping[str, float]) -> None:
    """Raise `WireError` unless GPU readings have known names, since they become metrics, and are finite."""
    all_among("gpus", gpus, {*MEASURED}, f"one of {', '.join(MEASURED)}")
    for name, value in gpus.items():
        must(math.isfinite(value), f"gpus[{name!r}]", value, "a finite number")


def all_among(
    field: str, names: Iterable[str], among: set[str], requirement: str = "one of those in the command"
) -> None:
    """Raise `WireError` unless each name is among those that a field may hold."""
    for name in names:
        must(name in among, field, name, requirement)


def _some(values: Iterable[object]) -> str:
    """Return values on one line of limited length."""
    return ", ".join(map(str, values))[-SHOWN:] or "none"


def check_whole(request: UnansweredRequest, reply: Generated, num_expected: int) -> None:
    """Raise `WireError` unless all samples of a request were sent, and are counted."""
    must(
        len(request.arrived) == num_expected,
        "command_id",
        reply.command_id,
        f"of a command whose {num_expected} samples were sent",
    )
    must(reply.num_samples == num_expected, "num_samples", reply.num_samples, f"{num_expected}, as asked for")
