"""Metrics that only some runs have: turns, ages, failures, parts of rewards, and origins of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tandem.common.messages import Purpose, SampleScored
from tandem.config import Config
from tandem.coordinator.algorithms.rewards import component_names
from tandem.samples.data_sets import EncodedProblem


def name_metrics(samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the means of the rewards' components, and the cost of scoring, under the environment's own names."""
    spent = sorted({name for sample in samples for name in sample.spent})
    return {
        f"reward/{name}": float(np.mean([sample.components.get(name, 0.0) for sample in samples]))
        for name in component_names(samples)
    } | {f"spent/{name}": float(sum(sample.spent.get(name, 0.0) for sample in samples)) for name in spent}


def age_metrics(step: int, samples: Sequence[SampleScored], oldest_age: int) -> dict[str, float]:
    """Return the ages of the weights that made a step's samples, where they may be older than the newest.

    The age of a weight version is the number of training steps between it and the version that the step begins with. A
    sample is as old as the weights it was begun with (NeMo-RL's ``avg_trajectory_age``). Tokens have their own ages.
    """
    ages_S = np.array([step - 1 - sample.oldest_version for sample in samples])
    num_tokens = np.zeros(oldest_age + 1)
    for age, sample in zip(ages_S.tolist(), samples, strict=True):
        for newer, count in enumerate(sample.tokens_by_version):
            num_tokens[age - newer] += count
    shares = num_tokens / max(1.0, num_tokens.sum())  # failed agents may have asked for no token
    return {
        "avg_trajectory_age": float(ages_S.mean()),
        "max_trajectory_age": float(ages_S.max()),
        **{f"token_share/age_{age}": float(share) for age, share in enumerate(shares)},
    }


def turn_metrics(config: Config, samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the numbers of turns of the samples, if they may take more than one, under NeMo-RL's names."""
    if config.agent is not None:
        return {
            "avg_turns_per_sample": float(np.mean([sample.num_turns for sample in samples])),
            "avg_branches_per_sample": float(np.mean([len(sample.branches) for sample in samples])),
        }
    if config.rollout_section.max_rollout_turns == 1:
        return {}
    return {
        "avg_turns_per_sample": float(np.mean([sample.num_turns for sample in samples])),
        "max_turns_reached_rate": float(np.mean([sample.finish_reason == "turns" for sample in samples])),
    }


def failure_metrics(samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the number of samples that the environment failed on, including those that took too long."""
    failed = [sample for sample in samples if sample.failure]
    return {
        "environment_failures": float(len(failed)),
        "environment_timeouts": float(sum(sample.timed_out for sample in failed)),
        "environment_dropped": float(sum(sample.dropped for sample in failed)),
    }


def metrics_by_origin(
    purpose: Purpose, samples: Sequence[SampleScored], drawn: Mapping[int, EncodedProblem], *, by_environment: bool
) -> dict[str, float]:
    """Return the rewards and accuracies of each data set that problems name, and of each environment."""
    of_set, of_environment = ("train", "env") if purpose == "train" else ("val", "val_env")
    by_origin: dict[str, list[SampleScored]] = {}
    for sample in samples:
        origin = drawn[sample.group]
        if origin.set_name:
            by_origin.setdefault(f"{of_set}_{origin.set_name}", []).append(sample)
        if by_environment:
            by_origin.setdefault(f"{of_environment}_{origin.environment}", []).append(sample)
    metrics: dict[str, float] = {}
    for name, origin_samples in sorted(by_origin.items()):
        if counted := [sample for sample in origin_samples if not sample.dropped]:
            metrics[f"{name}/reward"] = float(np.mean([sample.reward for sample in counted]))
            metrics[f"{name}/accuracy"] = float(np.mean([sample.correct for sample in counted]))
        if num_failed := sum(bool(sample.failure) for sample in origin_samples):
            metrics[f"{name}/environment_failures"] = float(num_failed)
    return metrics
