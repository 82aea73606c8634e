"""Spread counts relative to the size of the numbers: rounding is none, in every place that divides by one.

The right values are NeMo-RL v0.7's (`nemo_rl/algorithms/utils.py`, `calculate_baseline_and_std_per_prompt`, which
computes in float32, where the rewards of `ROUNDED` are equal) and, without a baseline that leaves one out, those of
TRL 1.16, whose deviation is the sample's: 1.5 there is 3 ** 0.5 here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from samples_harness import scored

from tandem.common.numeric import ROUNDING, differ
from tandem.config.schema import AdvEstimator, GrpoConfig
from tandem.coordinator.algorithms.advantages import advantages, decouple_advantages, group_advantages
from tandem.coordinator.algorithms.rewards import has_spread
from tandem.observe.health import HealthCondition
from tandem.trainer.advantages import explained_variance, whitened

ROUNDED = [0.8, 0.7 + 0.1, 0.8, 1.0]
"""Three rewards that are equal but for 1e-16, and one that is not."""


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def test_a_lone_success_among_rounded_rewards_has_nemo_rls_advantage() -> None:
    (found_N,) = group_advantages(np.array([ROUNDED]), leave_one_out=True, normalize=True)
    # The others of the last are equal: 1.0 - 0.8. Those of each other one are 0.8, 0.8 and 1.0.
    spread = math.sqrt(2) / 15
    np.testing.assert_allclose(found_N, [*[-0.2 / 3 / spread] * 3, 0.2], rtol=2e-5)


def test_without_leaving_one_out_it_is_trls_but_for_the_deviation() -> None:
    (found_N,) = group_advantages(np.array([ROUNDED]), leave_one_out=False, normalize=True)
    np.testing.assert_allclose(found_N[-1] * np.std(ROUNDED) / np.std(ROUNDED, ddof=1), 1.5, rtol=1e-4)


def noise(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Rounding, as a fraction of a number: of float64 and of float32."""
    largest = st.sampled_from([1e-16, 1e-15, 1e-12, 1e-9, 1e-7])
    return st.tuples(largest, arrays(np.float64, shape, elements=st.floats(-1, 1))).map(lambda pair: pair[0] * pair[1])


@given(
    arrays(np.float64, (3, 4), elements=st.sampled_from([-2.0, 0.0, 0.1, 0.7, 0.8, 1.0])),
    noise((3, 4)),
    st.sampled_from([1e-3, 1.0, 1e6]),
    st.booleans(),
)
def test_rounding_of_rewards_changes_no_advantage(
    rewards_GN: Any, noise_GN: Any, size: float, leave_one_out: bool
) -> None:
    how = {"leave_one_out": leave_one_out, "normalize": True}
    expected_GN = group_advantages(rewards_GN * size, **how)
    found_GN = group_advantages(rewards_GN * size * (1 + noise_GN), **how)
    np.testing.assert_allclose(found_GN, expected_GN, rtol=1e-4, atol=1e-5 * max(size, 1.0))


@given(arrays(np.float64, (2, 4), elements=st.sampled_from([0.8, 1e6 / 3, -7.3])), noise((2, 4)))
def test_rounding_is_no_spread_for_dynamic_sampling_and_gdpo(rewards_GN: Any, noise_GN: Any) -> None:
    equal_GN = np.repeat(rewards_GN[:, :1], 4, axis=1) * (1 + noise_GN)
    for equal_N in equal_GN:
        assert not has_spread(GrpoConfig(), [scored(0, i, reward=reward) for i, reward in enumerate(equal_N)])
    components_GNC = np.stack([equal_GN, 2 * equal_GN], axis=-1)
    assert not decouple_advantages(components_GNC, AdvEstimator(name="gdpo")).any()
    assert not advantages(equal_GN, AdvEstimator(name="reinforce_plus_plus"), np.ones((2, 4), dtype=np.bool_)).any()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_real_spreads_are_untouched(size: float) -> None:
    rewards = size * np.array([1.0, 1.0 + 1e-5, 1.0, 1.0])
    assert has_spread(GrpoConfig(), [scored(0, i, reward=reward) for i, reward in enumerate(rewards)])
    found_GN = group_advantages(rewards[None], leave_one_out=False, normalize=True)
    np.testing.assert_allclose(found_GN[0, 1], 3**0.5 / (1 + 1e-6 / rewards.std()), rtol=1e-4)


def test_components_that_cancel_leave_no_advantage() -> None:
    values_GN = np.array([[0.1, 0.7, 0.3, 1.0], [0.0, 1.0, 0.0, 0.0]])
    estimator = AdvEstimator(name="gdpo", reward_weights=(0.1, 0.2, -0.3))
    assert not decouple_advantages(np.stack([values_GN] * 3, axis=-1), estimator).any()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6, 1e12])
def test_trainers_do_not_whiten_rounding(size: float) -> None:
    """NeMo-RL v0.7 divides by at least 1e-4 (`advantage_estimator.py`), which is less than float32's steps at 1e6."""
    counts_T = np.ones(6, dtype=np.bool_)
    equal_T = (size * (1 + 1e-7 * np.arange(6))).astype(np.float32)
    assert not whitened(equal_T, counts_T, alone).any()
    assert explained_variance(equal_T, equal_T, alone) == 0.0
    returns_T = (size * np.arange(6)).astype(np.float32)
    assert explained_variance(returns_T, returns_T, alone) == 1.0


def test_a_warning_takes_rounded_rewards_for_equal() -> None:
    condition = HealthCondition(metric="reward_max", equals="reward_min", evidence="", look_at="")
    assert condition.holds({"reward_max": 0.8, "reward_min": 0.7 + 0.1})
    assert not condition.holds({"reward_max": 0.8, "reward_min": 0.8 - 1e-5})
    assert not HealthCondition(metric="grad_norm", equals=0.0, evidence="", look_at="").holds({"grad_norm": 1e-12})


def test_the_size_may_be_that_of_larger_numbers() -> None:
    assert differ(np.array([0.0, 2 * ROUNDING]), size=1.0)
    assert not differ(np.array([0.0, ROUNDING / 2]), size=1.0)
    assert not differ(np.zeros(3))
