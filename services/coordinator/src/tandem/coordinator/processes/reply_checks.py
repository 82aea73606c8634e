"""The parts of reply rules: requests as they are remembered, and comparisons that raise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tandem.common.errors import RefitError, WireError
from tandem.common.messages import Generate, SampleScored
from tandem.config import Config
from tandem.config.model_groups import model_groups_of
from tandem.config.models.model_sizes import vocabulary_size
from tandem.observe.exporters.nvml import MEASURED
from tandem.refit import layout

SHOWN = 100
"""Most characters of a value that an error shows."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of every sample of a run."""

    vocabulary: int
    max_tokens: int
    """Most tokens of a whole sequence."""
    max_turns: int
    plays: bool = False
    """Whether an agent plays episodes, with prompts of its own."""
    speakers: frozenset[str] = frozenset({"trainer-0"})
    """Trainers that report the run's metrics: the first of each model group."""

    @staticmethod
    def of(config: Config) -> Limits:
        """Return the limits of a run; its model folder must exist."""
        policy, longest = config.policy, config.policy.max_total_sequence_length
        if policy.generation.backend == "vllm":
            longest = max(longest, policy.generation.vllm_cfg.max_model_len)
        agent = config.agent
        turns = config.rollout_section.max_rollout_turns if config.declaration.rolls_out else 0
        if agent is not None:
            turns = agent.max_completions
        known = vocabulary_size(policy)
        return Limits(
            vocabulary=known,
            max_tokens=longest,
            max_turns=turns,
            plays=agent is not None,
            speakers=frozenset(f"trainer-{model_group.first}" for model_group in model_groups_of(config)),
        )


class KnownState(msgspec.Struct):
    """The state of a process as its requests and replies tell it."""

    num_tensors: tuple[int, ...] = ()
    """Numbers of tensors in the layouts of its shards."""
    versions: list[int] = []
    """Versions that it was given, in ascending order."""
    version: int = 0
    """Version that it last reported."""


class Asked(msgspec.Struct, kw_only=True):
    """A request without a complete answer."""

    name: str
    command: Any
    """Request of the type that the reply's rule names."""
    state: KnownState
    limits: Limits
    oldest_version: int
    """Oldest version with which the process may generate for this request."""
    arrived: set[tuple[int, int]] = msgspec.field(default_factory=set)
    """Samples received so far, by group and index."""
    num_tokens: int = 0
    """Number of generated tokens in these samples."""


# --- comparisons -----------------------------------------------------------------------------------------------------


def check_samples(asked: Asked, samples: Iterable[SampleScored]) -> None:
    """Compare the sizes of each sample with its request."""
    command: Generate = asked.command
    limits, groups = asked.limits, {group.group: group for group in command.groups}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(samples):
        group = groups.get(sample.group)
        if group is None:
            raise WireError(f"samples[{row}].group: {sample.group}, must be one that was asked for")
        prompt, made, turns = len(group.prompt_ids), sample.response_length, sample.num_turns
        fits(sample.sample < len(group.seeds), row, "sample", sample, "below {}", len(group.seeds))
        fits((sample.group, sample.sample) not in seen, row, "sample", sample, "in the message once")
        seen.add((sample.group, sample.sample))
        if limits.plays and made:
            _check_episode(asked, row, sample)
            continue
        fits(not sample.branches, row, "branches", sample, "none: no agent has asked for anything")
        fits(turns >= 1 or limits.plays or bool(sample.failure), row, "num_turns", sample, "at least 1")
        fits(sample.prompt_length == prompt, row, "prompt_length", sample, "{}, as asked for", prompt)
        fits(turns <= limits.max_turns, row, "num_turns", sample, "at most {}", limits.max_turns)
        most = min(turns * command.sampling.max_new_tokens, limits.max_tokens - prompt)
        fits(turns <= made <= most, row, "response_length", sample, "from {} to {}", turns, most)
        length = sample.num_tokens
        fits(length <= limits.max_tokens, row, "num_tokens", sample, "at most {}", limits.max_tokens)
        # An environment inserts text between two responses.
        is_all = length == prompt + made if turns <= 1 else length >= prompt + made
        fits(is_all, row, "num_tokens", sample, "that of the prompt, {}, and what follows, {}", prompt, made)
        can_end = sample.finish_reason != "turns" or turns == limits.max_turns
        fits(can_end, row, "finish_reason", sample, "another after {} of {}", turns, limits.max_turns)


def _check_episode(asked: Asked, row: int, sample: SampleScored) -> None:
    """Compare the sizes of an agent's episode with each other and with its request; its prompts are its own."""
    limits, turns, made = asked.limits, sample.num_turns, sample.response_length
    fits(1 <= turns <= limits.max_turns, row, "num_turns", sample, "from 1 to {}", limits.max_turns)
    most = turns * asked.command.sampling.max_new_tokens
    fits(turns <= made <= most, row, "response_length", sample, "from {} to {}", turns, most)
    fits(1 <= len(sample.branches) <= turns, row, "branches", sample, "from 1 to {}", turns)
    check_branches(limits, row, sample)
    fits(sample.finish_reason != "turns", row, "finish_reason", sample, "another: agents have no limit of turns")


def check_branches(limits: Limits, row: int, sample: SampleScored) -> None:
    """Compare the sizes of an agent's episode with each other."""
    for branch in sample.branches:
        is_whole = branch.prompt_length + branch.num_made <= branch.num_tokens <= limits.max_tokens
        fits(is_whole, row, "branches", sample, "at most {} tokens each, and at least what counts", limits.max_tokens)
    num_made, num_tokens = (sum(getattr(b, name) for b in sample.branches) for name in ("num_made", "num_tokens"))
    fits(num_made == sample.response_length, row, "response_length", sample, "that of the branches, {}", num_made)
    fits(num_tokens == sample.num_tokens, row, "num_tokens", sample, "that of the branches, {}", num_tokens)
    first = sample.branches[0].prompt_length
    fits(first == sample.prompt_length, row, "prompt_length", sample, "that of the first branch, {}", first)


def check_digests(asked: Asked, digests: tuple[bytes, ...]) -> None:
    """Compare the sizes of digests with those of their layouts."""
    sizes = tuple(map(len, digests))
    wanted = tuple(8 * num for num in asked.state.num_tensors)
    if sizes != wanted:
        what = f"{some(wanted)}: 8 for each tensor of a part's layout"
        must(False, "digests", f"{some(sizes)} bytes", what)


def fits(holds: bool, row: int, field: str, sample: SampleScored, what: str, *values: int) -> None:
    """Raise `WireError` unless a condition on a sample's field holds; format the text only then."""
    if not holds:
        must(False, f"samples[{row}].{field}", getattr(sample, field), what.format(*values))


def num_tensors_of(field: str, encoded: bytes) -> int:
    """Return the number of tensors in a layout. Raise `WireError` if it cannot be read."""
    try:
        return layout.num_tensors(encoded)
    except RefitError as error:
        raise WireError(f"{field}: {error}") from error


def must(holds: bool, field: str, value: object, what: str) -> None:
    """Raise `WireError` unless a condition on a field holds."""
    if not holds:
        shown = value if isinstance(value, str) else repr(value)
        raise WireError(f"{field}: {shown[:SHOWN]}, must be {what}")


def same(asked: Asked, reply: object, *fields: str) -> None:
    """Compare fields that a reply repeats from its request."""
    for field in fields:
        value, wanted = getattr(reply, field), getattr(asked.command, field)
        must(value == wanted, field, value, f"{wanted}, as in the command")


def finite(metrics: Mapping[str, float]) -> None:
    """Raise `WireError` unless all metrics are finite numbers."""
    for name, value in metrics.items():
        must(math.isfinite(value), f"metrics[{name!r}]", value, "a finite number")


def measured(gpus: Mapping[str, float]) -> None:
    """Raise `WireError` unless GPU readings have known names, since they become metrics, and are finite."""
    all_among("gpus", gpus, {*MEASURED}, f"one of {', '.join(MEASURED)}")
    for name, value in gpus.items():
        must(math.isfinite(value), f"gpus[{name!r}]", value, "a finite number")


def all_among(field: str, names: Iterable[str], among: set[str], what: str = "one of those in the command") -> None:
    """Raise `WireError` unless each name is among those that a field may hold."""
    for name in names:
        must(name in among, field, name, what)


def some(values: Iterable[object]) -> str:
    """Return values on one line of limited length."""
    return ", ".join(map(str, values))[-SHOWN:] or "none"
