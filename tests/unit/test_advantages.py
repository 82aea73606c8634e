"""Advantages against numbers worked out by hand, and the batch they end up in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tandem.common.batch import SampleArrays
from tandem.common.config import Config, build_config
from tandem.common.messages import SampleScored
from tandem.coordinator.algorithms.advantages import group_advantages
from tandem.coordinator.algorithms.grpo import training_batch

EPSILON = 1e-6


def advantages(rewards: list[list[float]], **how: bool) -> Any:
    return group_advantages(np.array(rewards), **{"leave_one_out": True, "normalize": True, **how})


def test_the_plain_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    found = advantages([[1.0, 2.0, 6.0], [0.0, 0.0, 1.0]], normalize=False)
    np.testing.assert_allclose(found, [[1 - 4, 2 - 3.5, 6 - 1.5], [-0.5, -0.5, 1.0]])


def test_without_leaving_out_the_baseline_is_the_mean_of_all() -> None:
    found = advantages([[1.0, 2.0, 6.0]], leave_one_out=False, normalize=False)
    np.testing.assert_allclose(found, [[-2, -1, 3]])


def test_normalising_divides_by_the_spread_of_the_same_rewards() -> None:
    found = advantages([[1.0, 2.0, 6.0]])
    # The others of the first are 2 and 6: mean 4, standard deviation 2; and so on.
    np.testing.assert_allclose(found, [[-3 / 2, -1.5 / 2.5, 4.5 / 0.5]], rtol=1e-5)
    everyone = advantages([[1.0, 2.0, 6.0]], leave_one_out=False)
    spread = math.sqrt((4 + 1 + 9) / 3)
    np.testing.assert_allclose(everyone, [[-2 / spread, -1 / spread, 3 / spread]], rtol=1e-5)


def test_a_lone_success_keeps_its_plain_advantage() -> None:
    found = advantages([[1.0, 0.0, 0.0, 0.0]])
    # Its others do not differ, so there is nothing to divide by; theirs are one success and two failures.
    spread = math.sqrt(1 / 3 - 1 / 9)
    np.testing.assert_allclose(found, [[1.0, *[-1 / 3 / spread] * 3]], rtol=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3, 1e6 / 3])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_give_no_advantage_whatever_rounding_does(reward: float, leave_one_out: bool) -> None:
    found = advantages([[reward] * 7], leave_one_out=leave_one_out)
    np.testing.assert_allclose(found, 0.0, atol=1e-9)


def test_rewards_that_differ_by_rounding_alone_are_not_blown_up() -> None:
    found = advantages([[0.3, 0.1 + 0.2, 0.3, 0.3]])
    assert np.abs(found).max() < 1e-9


@given(arrays(np.float64, (3, 5), elements=st.floats(-100, 100)))
def test_leaving_one_out_scales_the_plain_advantage(rewards_GN: Any) -> None:
    # r - mean(others) = N / (N - 1) * (r - mean(all)): the identity behind RLOO.
    left_out = group_advantages(rewards_GN, leave_one_out=True, normalize=False)
    plain = group_advantages(rewards_GN, leave_one_out=False, normalize=False)
    np.testing.assert_allclose(left_out, plain * 5 / 4, rtol=1e-5, atol=1e-4)


@given(arrays(np.float64, (2, 4), elements=st.floats(-10, 10)))
def test_groups_do_not_see_each_other(rewards_GN: Any) -> None:
    together = group_advantages(rewards_GN, leave_one_out=True, normalize=True)
    apart = [group_advantages(row[None], leave_one_out=True, normalize=True)[0] for row in rewards_GN]
    np.testing.assert_array_equal(together, apart)


# --- the batch -------------------------------------------------------------------------------------------------------


def grpo_config() -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 3},
            "policy": {"model_name": "model", "train_global_batch_size": 6, "train_micro_batch_size": 6},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


REWARDS = [[1.0, 2.0, 6.0], [0.5, 0.5, 0.5]]


def samples_and_arrays(rewards: list[list[float]] = REWARDS) -> tuple[list[SampleScored], SampleArrays]:
    """Make two groups of three; sample ``i`` of all has ``i + 1`` made tokens after two of the prompt."""
    samples = []
    for group, row in enumerate(rewards):
        for sample, reward in enumerate(row):
            number = group * 3 + sample
            samples.append(
                SampleScored(
                    group=group,
                    sample=sample,
                    prompt_length=2,
                    response_length=number + 1,
                    num_turns=1,
                    finish_reason="length" if number == 5 else "stop",
                    reward=reward,
                    correct=reward > 0.9,
                    response="",
                )
            )
    lengths = np.arange(3, 9, dtype=np.int32)
    total = int(lengths.sum())
    arrays_of_samples = SampleArrays(
        lengths_S=lengths,
        token_ids_T=np.arange(total, dtype=np.int32),
        loss_mask_T=np.concatenate([np.arange(length) >= 2 for length in lengths]),
        generation_logprobs_T=-np.arange(total, dtype=np.float32),
        versions_T=np.zeros(total, dtype=np.int32),
    )
    return samples, arrays_of_samples


def test_each_sequence_gets_the_advantage_of_its_sample() -> None:
    samples, sample_arrays = samples_and_arrays()
    batch, _ = training_batch(grpo_config(), samples, sample_arrays)
    expected = group_advantages(np.array(REWARDS), leave_one_out=True, normalize=True).reshape(-1)
    np.testing.assert_array_equal(batch.advantages_S, expected)
    assert batch.advantages_S.dtype == np.float32
    np.testing.assert_array_equal(batch.token_ids_T, sample_arrays.token_ids_T)
    np.testing.assert_array_equal(batch.loss_mask_T, sample_arrays.loss_mask_T)
    np.testing.assert_array_equal(batch.generation_logprobs_T, sample_arrays.generation_logprobs_T)


def test_the_metrics_describe_the_samples() -> None:
    _, metrics = training_batch(grpo_config(), *samples_and_arrays())
    flat = np.array(REWARDS).reshape(-1)
    assert metrics == pytest.approx(
        {
            "reward": flat.mean(),
            "reward_std": flat.std(),
            "reward_min": 0.5,
            "reward_max": 6.0,
            "accuracy": 3 / 6,
            "mean_generation_length": (1 + 2 + 3 + 4 + 5 + 6) / 6,
            "max_generation_length": 6,
            "truncated_fraction": 1 / 6,
            "groups_without_spread": 1 / 2,
        }
    )


def test_a_batch_of_samples_in_another_order_is_refused() -> None:
    samples, sample_arrays = samples_and_arrays()
    with pytest.raises(AssertionError, match="order"):
        training_batch(grpo_config(), samples[::-1], sample_arrays)
