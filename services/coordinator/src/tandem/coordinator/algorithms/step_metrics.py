"""The metrics of a step's samples that every run has: rewards and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from tandem.common.messages import SampleScored
from tandem.config import Config
from tandem.coordinator.algorithms.extra_metrics import (
    failure_metrics,
    named_metrics,
    turn_metrics,
)

if TYPE_CHECKING:
    from tandem.coordinator.algorithms.step_batch import SampleColumns

_FAILURE, _COMPONENTS, _SPENT = map(attrgetter, ("failure", "components", "spent"))


def sample_metrics(config: Config, columns: SampleColumns, samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the metrics of all samples of a step, whether they are trained on or not; `columns` are theirs.

    Dropped samples have no reward. If all were dropped, the step has none.
    """
    counted_S, rewards_S = ~columns.is_dropped_S, columns.rewards_S
    counted_GN = counted_S.reshape(-1, config.rollout_section.num_generations_per_prompt)
    rewards_GN = rewards_S.reshape(counted_GN.shape)
    least_G = np.where(counted_GN, rewards_GN, np.inf).min(axis=1)
    most_G = np.where(counted_GN, rewards_GN, -np.inf).max(axis=1)
    metrics: dict[str, float] = {}
    if counted_S.any():
        counted = rewards_S[counted_S]
        metrics |= {
            "reward": float(counted.mean()),
            "reward_std": float(counted.std()),
            "reward_min": float(counted.min()),
            "reward_max": float(counted.max()),
            "accuracy": float(columns.is_correct_S[counted_S].mean()),
        }
        rewarded = [sample for sample in samples if not sample.dropped]
        if any(map(_COMPONENTS, rewarded)) or any(map(_SPENT, rewarded)):
            metrics |= named_metrics(rewarded)
    metrics |= {
        "mean_generation_length": float(columns.response_lengths_S.mean()),
        "max_generation_length": float(columns.response_lengths_S.max()),
        "truncated_fraction": float(columns.is_truncated_S.mean()),
        "groups_without_spread": float((most_G <= least_G).mean()),
    }
    if config.agent is not None or config.rollout_section.max_rollout_turns > 1:
        metrics |= turn_metrics(config, samples)
    if any(map(_FAILURE, samples)):
        metrics |= failure_metrics(samples)
    return metrics
