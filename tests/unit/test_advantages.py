"""Advantages against numbers worked out by hand, and the batch they end up in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tandem.common.batch import SampleArrays
from tandem.common.config import Config, build_config
from tandem.common.config.schema import AdvEstimator, RewardScaling, RewardShaping
from tandem.common.errors import RewardError
from tandem.common.messages import SampleScored
from tandem.coordinator.algorithms.advantages import decoupled_advantages, group_advantages
from tandem.coordinator.algorithms.grpo import training_batch
from tandem.coordinator.algorithms.rewards import has_spread, scaled, shaped

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


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reward", "expected"), [(0.0, -1.0), (1.0, 1.0), (0.25, -0.5), (-3.0, -1.0), (7.0, 1.0)])
def test_scaling_is_linear_and_clamps(reward: float, expected: float) -> None:
    settings = RewardScaling(enabled=True, source_min=0.0, source_max=1.0, target_min=-1.0, target_max=1.0)
    assert scaled(np.array([reward]), settings).tolist() == pytest.approx([expected])
    assert scaled(np.array([reward]), RewardScaling(target_max=9.0)).tolist() == [reward]


@pytest.mark.parametrize(("length", "loss"), [(1, 0.0), (80, 0.0), (85, 0.125), (90, 0.25), (100, 0.5), (120, 0.5)])
def test_soft_overlong_punishment(length: int, loss: float) -> None:
    # DAPO, equation 13, with L = 100, C = 20 and a penalty of 0.5.
    settings = RewardShaping(
        enabled=True, max_response_length=100, overlong_buffer_length=20, overlong_buffer_penalty=0.5
    )
    found = shaped(np.array([1.0]), np.array([length]), np.array([False]), settings)
    assert found.tolist() == pytest.approx([1.0 - loss])


def test_samples_that_did_not_stop_properly_keep_a_share_of_their_reward() -> None:
    settings = RewardShaping(enabled=True, stop_properly_penalty_coef=0.25)
    found = shaped(np.array([1.0, -2.0, 1.0]), np.array([9, 9, 9]), np.array([True, True, False]), settings)
    assert found.tolist() == [0.25, -0.5, 1.0]


def with_grpo(**changes: Any) -> Config:
    config = grpo_config()
    return msgspec.structs.replace(config, grpo=msgspec.structs.replace(config.grpo, **changes))


def test_advantages_are_made_of_rewards_that_were_scaled_and_then_shaped() -> None:
    config = with_grpo(
        reward_scaling=RewardScaling(enabled=True, source_max=2.0, target_max=10.0),
        reward_shaping=RewardShaping(
            enabled=True, max_response_length=5, overlong_buffer_length=2, overlong_buffer_penalty=4.0
        ),
    )
    batch, metrics = training_batch(config, *samples_and_arrays())
    # 1, 2, 6 become 5, 10, 10; the last three, of 4, 5 and 6 tokens, lose 2, 4 and 4.
    trained = np.array([[5.0, 10.0, 10.0], [0.5, -1.5, -1.5]])
    expected = group_advantages(trained, leave_one_out=True, normalize=True).reshape(-1)
    np.testing.assert_allclose(batch.advantages_S, expected)
    assert metrics["training_reward"] == pytest.approx(trained.mean())
    assert metrics["reward"] == pytest.approx(np.mean(REWARDS)), "the environment's, comparable between runs"


def test_a_sample_that_was_cut_off_counts_in_the_baseline_but_not_in_the_loss() -> None:
    samples, sample_arrays = samples_and_arrays([[1.0, 2.0, 6.0], [0.0, 0.0, 1.0]])
    plain, _ = training_batch(grpo_config(), samples, sample_arrays)
    filtered, metrics = training_batch(with_grpo(overlong_filtering=True), samples, sample_arrays)
    np.testing.assert_array_equal(filtered.advantages_S, plain.advantages_S)
    last = int(sample_arrays.lengths_S[-1])
    np.testing.assert_array_equal(filtered.loss_mask_T[:-last], sample_arrays.loss_mask_T[:-last])
    assert not filtered.loss_mask_T[-last:].any()
    assert metrics["truncated_fraction"] == pytest.approx(1 / 6)


# --- estimators ------------------------------------------------------------------------------------------------------


def test_the_estimator_may_differ_from_the_section() -> None:
    for estimator in (
        AdvEstimator(normalize_rewards=False, use_leave_one_out_baseline=False),
        AdvEstimator(normalize_rewards=True, use_leave_one_out_baseline=False),
    ):
        expected = group_advantages(
            np.array(REWARDS), leave_one_out=False, normalize=estimator.normalize_rewards
        ).reshape(-1)
        batch, _ = training_batch(with_grpo(adv_estimator=estimator), *samples_and_arrays())
        np.testing.assert_array_equal(batch.advantages_S, expected)


@pytest.mark.parametrize(
    ("minus_baseline", "expected"), [(True, [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]), (False, [1.0, 2.0, 6.0, 0.5, 0.5, 0.5])]
)
def test_reinforce_plus_plus_leaves_normalising_to_the_trainer(minus_baseline: bool, expected: list[float]) -> None:
    estimator = AdvEstimator(name="reinforce_plus_plus", minus_baseline=minus_baseline)
    batch, _ = training_batch(with_grpo(adv_estimator=estimator), *samples_and_arrays())
    assert batch.advantages_S.tolist() == expected


# --- GDPO ------------------------------------------------------------------------------------------------------------

COMPONENTS = [[(1.0, 0.0), (0.0, 5.0), (0.0, 0.0)], [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)]]
"""Of each sample: whether it is right, and how short; the second differs on another scale."""


@pytest.mark.parametrize("weights", [None, (1.0, 0.25)])
@pytest.mark.parametrize("normalize", [True, False])
def test_gdpo_by_hand(weights: tuple[float, float] | None, normalize: bool) -> None:
    # arXiv:2601.05242: each component within its group, weighted and added, normalised over the batch.
    rewards_GNC = np.array(COMPONENTS)
    settings = AdvEstimator(
        name="gdpo", reward_weights=weights, normalize_rewards=normalize, use_leave_one_out_baseline=False
    )
    combined = []
    for group in COMPONENTS:
        for sample in group:
            total = 0.0
            for component, weight in enumerate(weights or (1.0, 1.0)):
                values = [other[component] for other in group]
                mean = sum(values) / 3
                deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 3)
                total += weight * (sample[component] - mean) / (deviation + EPSILON if normalize else 1.0)
            combined.append(total)
    mean = sum(combined) / 6
    deviation = math.sqrt(sum((value - mean) ** 2 for value in combined) / 5)
    expected = np.array([(value - mean) / deviation for value in combined]).reshape(2, 3)
    np.testing.assert_allclose(decoupled_advantages(rewards_GNC, settings), expected, rtol=1e-5, atol=1e-6)


def test_groups_that_grpo_takes_for_alike_are_told_apart_by_gdpo() -> None:
    """The paper's example, figure 2: one sample has one component more than the other, or two."""
    rewards_GNC = np.array([[(0.0, 0.0), (0.0, 1.0)], [(0.0, 0.0), (1.0, 1.0)]])
    plain = advantages(rewards_GNC.sum(axis=2).tolist(), leave_one_out=False)
    np.testing.assert_allclose(plain, [[-1, 1], [-1, 1]], rtol=1e-5)
    decoupled = decoupled_advantages(rewards_GNC, AdvEstimator(name="gdpo", use_leave_one_out_baseline=False))
    np.testing.assert_allclose(decoupled[1], 2 * decoupled[0], rtol=1e-5)


def gdpo_samples() -> tuple[list[SampleScored], SampleArrays]:
    samples, sample_arrays = samples_and_arrays()
    parts = [component for group in COMPONENTS for component in group]
    named = [
        msgspec.structs.replace(sample, components={"short": short, "right": right})
        for sample, (right, short) in zip(samples, parts, strict=True)
    ]
    return named, sample_arrays


def test_the_components_of_a_batch() -> None:
    estimator = AdvEstimator(name="gdpo", reward_weights=(1.0, 0.25))
    scaling = RewardScaling(enabled=True, source_max=10.0)
    batch, metrics = training_batch(with_grpo(adv_estimator=estimator, reward_scaling=scaling), *gdpo_samples())
    expected = decoupled_advantages(np.array(COMPONENTS) / 10, estimator).reshape(-1)
    np.testing.assert_allclose(batch.advantages_S, expected, rtol=1e-6)
    assert (metrics["reward/right"], metrics["reward/short"]) == (0.5, 1.0)


def test_gdpo_needs_components_and_a_weight_for_each() -> None:
    config = with_grpo(adv_estimator=AdvEstimator(name="gdpo"))
    with pytest.raises(RewardError, match=r"at least two components, environment 'reasoning_gym' gave none$"):
        training_batch(config, *samples_and_arrays())
    config = with_grpo(adv_estimator=AdvEstimator(name="gdpo", reward_weights=(1.0,)))
    with pytest.raises(RewardError, match=r"reward_weights: 1 weights, but .* gave right, short$"):
        training_batch(config, *gdpo_samples())


# --- samples that are dropped ----------------------------------------------------------------------------------------


def with_failures(samples: list[SampleScored], numbers: Sequence[int]) -> list[SampleScored]:
    """Return samples of which these were dropped, with a reward that must not count."""
    return [
        msgspec.structs.replace(sample, failure="why", timed_out=number == 0, dropped=True, reward=99.0, correct=True)
        if number in numbers
        else sample
        for number, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_dropped_sample_does_not_train_and_is_in_nobodys_baseline(leave_one_out: bool, normalize: bool) -> None:
    estimator = AdvEstimator(normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)
    rewards = [[1.0, 0.0, 6.0], [2.0, 0.0, 0.0]]
    samples, sample_arrays = samples_and_arrays(rewards)
    batch, metrics = training_batch(
        with_grpo(adv_estimator=estimator), with_failures(samples, [1, 4, 5]), sample_arrays
    )
    # Of the first group 1 and 6 are left: each is the other's baseline, or 3.5 is both's. Of the second only one is.
    if leave_one_out:
        first, last = -5.0, 5.0  # a baseline of one sample has no deviation to divide by
    elif normalize:
        first, last = -2.5 / (2.5 + EPSILON), 2.5 / (2.5 + EPSILON)
    else:
        first, last = -2.5, 2.5
    assert batch.advantages_S.tolist() == pytest.approx([first, 0.0, last, 0.0, 0.0, 0.0])
    starts = np.concatenate([[0], np.cumsum(sample_arrays.lengths_S)])
    for number in range(6):
        own = slice(starts[number], starts[number + 1])
        expected = np.zeros_like(batch.loss_mask_T[own]) if number in (1, 4, 5) else sample_arrays.loss_mask_T[own]
        np.testing.assert_array_equal(batch.loss_mask_T[own], expected)
    assert metrics["reward"] == pytest.approx(3.0)
    assert metrics["reward_std"] == pytest.approx(math.sqrt((4 + 9 + 1) / 3))
    assert (metrics["reward_min"], metrics["reward_max"], metrics["accuracy"]) == (1.0, 6.0, 1.0)
    assert metrics["groups_without_spread"] == 0.5
    assert metrics["mean_generation_length"] == 3.5
    assert [metrics[f"environment_{what}"] for what in ("failures", "timeouts", "dropped")] == [3.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("minus_baseline", "expected"), [(True, [-2.5, 0.0, 2.5, 0.0, 0.0, 0.0]), (False, [1.0, 0.0, 6.0, 0.5, 0.0, 0.0])]
)
def test_reinforce_plus_plus_without_dropped_samples(minus_baseline: bool, expected: list[float]) -> None:
    estimator = AdvEstimator(name="reinforce_plus_plus", minus_baseline=minus_baseline)
    samples, sample_arrays = samples_and_arrays()
    batch, _ = training_batch(with_grpo(adv_estimator=estimator), with_failures(samples, [1, 4, 5]), sample_arrays)
    assert batch.advantages_S.tolist() == expected


def test_gdpo_compares_and_normalises_over_what_is_left() -> None:
    estimator = AdvEstimator(name="gdpo", normalize_rewards=False, use_leave_one_out_baseline=False)
    samples, sample_arrays = gdpo_samples()
    batch, metrics = training_batch(
        with_grpo(adv_estimator=estimator), with_failures(samples, [2, 4, 5]), sample_arrays
    )
    # Left are (1, 0) and (0, 5): 0.5 - 2.5 and -0.5 + 2.5, of mean 0 and deviation sqrt(8); and one with nobody beside.
    assert batch.advantages_S.tolist() == pytest.approx([-2 / math.sqrt(8), 2 / math.sqrt(8), 0.0, 0.0, 0.0, 0.0])
    assert (metrics["reward/right"], metrics["reward/short"]) == pytest.approx((2 / 3, 2.0))


def test_a_step_of_which_everything_was_dropped_has_no_rewards_and_trains_nothing() -> None:
    samples, sample_arrays = samples_and_arrays()
    scaling = RewardScaling(enabled=True)
    batch, metrics = training_batch(with_grpo(reward_scaling=scaling), with_failures(samples, range(6)), sample_arrays)
    assert not batch.loss_mask_T.any()
    assert not batch.advantages_S.any()
    assert not {"reward", "reward_std", "accuracy", "training_reward"} & metrics.keys()
    assert metrics["groups_without_spread"] == 1.0
    assert (metrics["environment_failures"], metrics["environment_timeouts"]) == (6.0, 1.0)


def test_a_failure_that_is_worth_nothing_is_a_sample_like_others() -> None:
    samples, sample_arrays = samples_and_arrays()
    failed = [msgspec.structs.replace(sample, failure="why") for sample in samples]
    batch, metrics = training_batch(grpo_config(), failed, sample_arrays)
    plain, usual = training_batch(grpo_config(), samples, sample_arrays)
    np.testing.assert_array_equal(batch.advantages_S, plain.advantages_S)
    np.testing.assert_array_equal(batch.loss_mask_T, plain.loss_mask_T)
    assert metrics == usual | {"environment_failures": 6.0, "environment_timeouts": 0.0, "environment_dropped": 0.0}


def test_dropped_samples_make_no_spread() -> None:
    samples = samples_and_arrays()[0][:3]
    for dropped, expected in (([], True), ([2], True), ([0], True), ([0, 1], False), ([0, 1, 2], False)):
        assert has_spread(grpo_config().grpo, with_failures(samples, dropped)) is expected
    alike = [msgspec.structs.replace(sample, reward=1.0) for sample in samples]
    assert not has_spread(grpo_config().grpo, with_failures(alike, [1]))
