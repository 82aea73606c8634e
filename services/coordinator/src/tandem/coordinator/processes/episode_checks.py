"""Comparisons of the samples of agents, which play episodes with prompts of their own."""

from __future__ import annotations

from tandem.common.messages import (
    SampleScored,
)
from tandem.coordinator.processes.reply_checks import Asked, fits
from tandem.coordinator.processes.sample_limits import Limits


def check_episode(asked: Asked, row: int, sample: SampleScored) -> None:
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
