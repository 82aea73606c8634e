"""Rewards: the environment's rewards, scaled and shaped for the advantages.

Shapes: ``S`` samples, ``C`` components of a reward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import SampleScored
from tandem.common.numeric import differ
from tandem.config.schema import RewardScaling, RewardShaping, RolloutsConfig

Float64s = NDArray[np.float64]


def has_spread(section: RolloutsConfig, samples: Sequence[SampleScored]) -> bool:
    """Tell whether the rewards of a group differ by more than rounding, before shaping by length.

    If they do not, every advantage is zero (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 11), or comes from lengths
    alone. Dropped samples do not count. Where the policy plays several roles, those of one role are enough.
    """
    samples = [sample for sample in samples if not sample.dropped]
    if not samples:
        return False
    estimator = section.group_estimator
    if estimator is not None and estimator.name == "gdpo":
        values_SC = component_rewards(samples, section, component_names(samples))
    elif samples[0].role_rewards:
        return _has_spread_in_a_role(section, samples)
    else:
        values_SC = scale(np.array([[sample.reward] for sample in samples]), section.reward_scaling)
    return bool(differ(values_SC, axis=0).any())


def _has_spread_in_a_role(section: RolloutsConfig, samples: Sequence[SampleScored]) -> bool:
    """Tell whether the rewards of any role differ, of the samples in which the policy plays it."""
    by_role = [
        np.array([sample.role_rewards[role] for sample in samples if role in sample.roles])
        for role in range(len(samples[0].role_rewards))
    ]
    return any(bool(differ(scale(rewards_S, section.reward_scaling))) for rewards_S in by_role if len(rewards_S))


def component_names(samples: Sequence[SampleScored]) -> list[str]:
    """Return the names of the components that any sample has, in alphabetical order."""
    return sorted({name for sample in samples for name in sample.components})


def component_rewards(samples: Sequence[SampleScored], section: RolloutsConfig, names: Sequence[str]) -> Float64s:
    """Return the scaled components ``[S, C]``. One that a sample lacks, perhaps because a limit ended it, is zero."""
    values_SC = np.array([[sample.components.get(name, 0.0) for name in names] for sample in samples], dtype=np.float64)
    return scale(values_SC.reshape(len(samples), len(names)), section.reward_scaling)


def scale(rewards: Float64s, settings: RewardScaling) -> Float64s:
    """Map rewards, clamped to the source interval, linearly to the target interval."""
    if not settings.enabled:
        return rewards
    within = (np.clip(rewards, settings.source_min, settings.source_max) - settings.source_min) / (
        settings.source_max - settings.source_min
    )
    return np.asarray(settings.target_min + within * (settings.target_max - settings.target_min))


def shape(
    rewards_S: Float64s, lengths_S: NDArray[np.int64], is_truncated_S: NDArray[np.bool_], settings: RewardShaping
) -> Float64s:
    """Return rewards shaped by the length of the response.

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13): with a longest length L and a
    buffer of C tokens, a response up to L - C loses nothing. From there the penalty grows evenly, up to the whole of it
    at L and beyond. With `stop_properly_penalty_coef` c, the reward of a sample that was cut off is multiplied by c
    instead.
    """
    if not settings.enabled:
        return rewards_S
    if settings.stop_properly_penalty_coef is not None:
        return np.where(is_truncated_S, settings.stop_properly_penalty_coef * rewards_S, rewards_S)
    longest, buffer, penalty = (
        settings.max_response_length,
        settings.overlong_buffer_length,
        settings.overlong_buffer_penalty,
    )
    assert longest is not None, "the configuration is checked before anything starts"
    assert buffer is not None
    assert penalty is not None
    return np.asarray(rewards_S - penalty * np.clip((lengths_S - (longest - buffer)) / buffer, 0.0, 1.0))
