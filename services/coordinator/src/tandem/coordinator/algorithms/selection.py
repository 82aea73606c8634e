"""The groups that a step leaves out: drawn in vain, of equal rewards, or with impossible numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import SampleScored
from tandem.common.numeric.outliers import PHRASE, find_usual_size
from tandem.common.returned import beyond, line
from tandem.config import Config
from tandem.config.schema import RolloutsConfig
from tandem.coordinator.algorithms.advantages import within
from tandem.coordinator.algorithms.places import NUM_BATCHES
from tandem.coordinator.algorithms.rewards import has_spread


def dynamic_sampling(section: RolloutsConfig, samples: Sequence[SampleScored]) -> tuple[list[int], dict[str, float]]:
    """Return the rows of the samples to train on, and the counts of groups, under NeMo-RL's names.

    They are those of the first `num_prompts_per_step` informative groups, in the order in which the step drew them,
    whatever order they finished in.
    """
    size = section.num_generations_per_prompt
    firsts = range(0, len(samples), size)
    useful = [first for first in firsts if has_spread(section, samples[first : first + size])]
    used = useful[: section.num_prompts_per_step]
    assert len(used) == section.num_prompts_per_step, "the scheduler goes on until there are as many"
    return [row for first in used for row in range(first, first + size)], {
        NUM_BATCHES: len(firsts) / section.num_prompts_per_batch,
        "dynamic_sampling_num_dropped_groups": float(len(firsts) - len(useful)),
        "dynamic_sampling_num_discarded_valid_samples": float((len(useful) - len(used)) * size),
    }


def rows_of_equal_rewards(section: RolloutsConfig, samples: Sequence[SampleScored]) -> set[int]:
    """Return the rows of the samples in groups whose rewards are all equal."""
    size = section.num_generations_per_prompt
    firsts = range(0, len(samples), size)
    equal = [first for first in firsts if not has_spread(section, samples[first : first + size])]
    return {row for first in equal for row in range(first, first + size)}


def set_aside_note(
    samples: Sequence[SampleScored], rewards_S: NDArray[np.float64], advantages_S: NDArray[np.float32]
) -> str:
    """Name the first sample with a reward or advantage that no run can compute with."""
    place = int((~(within(rewards_S) & within(advantages_S))).argmax())
    quantity, value = (
        ("reward", rewards_S[place]) if not within(rewards_S)[place] else ("advantage", advantages_S[place])
    )
    sample = samples[place]
    return (
        f"group {sample.group}, sample {sample.sample}: its {quantity} is {beyond(float(value))}: "
        "groups with such a sample are set aside"
    )


def drop_outliers(
    section: RolloutsConfig, kept_S: NDArray[np.bool_], outlying_S: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], dict[str, float]]:
    """Return which samples to train on, without groups that have an outlier if these are set aside, and the counts."""
    counts = {"advantage_outliers": float(outlying_S.sum())}
    if not section.set_aside_outliers:
        return kept_S, counts
    is_outlying_G = outlying_S.reshape(-1, section.num_generations_per_prompt).any(axis=1)
    counts["groups_set_aside/advantages"] = float(is_outlying_G.sum())
    return kept_S & np.repeat(~is_outlying_G, section.num_generations_per_prompt), counts


def outlier_note(
    config: Config,
    samples: Sequence[SampleScored],
    advantages_S: NDArray[np.float32],
    outlying_S: NDArray[np.bool_],
    problem_of: Callable[[int], str] | None = None,
) -> str:
    """Name the sample with the largest advantage that is out of all proportion to the others of its step."""
    place = int((np.abs(advantages_S) * outlying_S).argmax())
    sample, value, usual = samples[place], abs(float(advantages_S[place])), find_usual_size(advantages_S)
    aside = "groups with such a sample are set aside"
    if not config.rollout_section.set_aside_outliers:
        aside = f"{config.algorithm}.set_aside_outliers sets such groups aside"
    rewards = [each.reward for each in samples if each.group == sample.group and not each.dropped]
    problem = "" if problem_of is None else f" (problem {line(problem_of(sample.group))})"
    return (
        f"group {sample.group}{problem}, sample {sample.sample}: an advantage of {float(advantages_S[place]):.4g} is "
        f"{PHRASE}: {value / usual:,.0f} times the usual {usual:.3g} of the step; its reward is "
        f"{sample.reward:.6g}, and those of its group are {min(rewards):.6g} to {max(rewards):.6g} ({aside})"
    )
