"""Advantages against numbers worked out by hand, and the batch they end up in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from samples_harness import scored

from tandem.common.errors import RewardError
from tandem.common.messages import SampleScored
from tandem.config import Config, build_config
from tandem.config.schema import AdvEstimator, RewardScaling, RewardShaping
from tandem.coordinator.algorithms.advantages import advantages as estimated
from tandem.coordinator.algorithms.advantages import decouple_advantages, group_advantages
from tandem.coordinator.algorithms.rewards import has_spread, scale, shape
from tandem.coordinator.algorithms.step_batch import training_batch
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import NO_PROMPT

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


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_the_spread_of_a_whole_batch_may_divide(leave_one_out: bool) -> None:
    """PyTorch's standard deviation; TRL 1.16, GRPOTrainer: (rewards - group mean) / (rewards.std() + epsilon)."""
    rewards_GN = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 1.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
    settings = AdvEstimator(scale_rewards="batch", use_leave_one_out_baseline=leave_one_out)
    means_GN = rewards_GN.mean(dim=1, keepdim=True)
    if leave_one_out:
        means_GN = (3 * means_GN - rewards_GN) / 2
    found_GN = estimated(rewards_GN.numpy(), settings, np.ones((3, 3), dtype=np.bool_))
    np.testing.assert_allclose(found_GN, (rewards_GN - means_GN) / rewards_GN.std(), rtol=1e-5)
    # What does not count has no part in the spread, and no advantage.
    counts_GN = np.array([[True] * 3, [True] * 3, [False] * 3])
    found_GN = estimated(rewards_GN.numpy(), settings, counts_GN)
    np.testing.assert_allclose(found_GN[:2], (rewards_GN - means_GN)[:2] / rewards_GN[:2].std(), rtol=1e-5)
    assert not found_GN[2].any()


def test_a_batch_without_spread_divides_by_nothing() -> None:
    rewards_GN = np.array([[0.8, 0.7 + 0.1], [0.8, 0.8]])
    settings = AdvEstimator(scale_rewards="batch", use_leave_one_out_baseline=False)
    assert not estimated(rewards_GN, settings, np.ones((2, 2), dtype=np.bool_)).any()
    alone = AdvEstimator(scale_rewards="batch", use_leave_one_out_baseline=False)
    assert not estimated(rewards_GN, alone, np.array([[True, False], [False, False]])).any()


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


def records_of(rewards: list[list[float]] = REWARDS) -> list[SampleRecord]:
    """Make two groups of three; sample ``i`` of all has ``i + 1`` made tokens after two of the prompt."""
    records = []
    for number, reward in enumerate(itertools.chain(*rewards)):
        cut_off = {"finish_reason": "length"} if number == 5 else {}
        sizes = {"prompt_length": 2, "response_length": number + 1}
        one = scored(*divmod(number, 3), reward=reward, correct=reward > 0.9, **sizes, **cut_off)
        records.append(SampleRecord(one, f"rollout-{number % 2}", 7 + number))
    return records


def batch_with(config: Config, records: list[SampleRecord]) -> tuple[SampleBatch, dict[str, float]]:
    batch, metrics = training_batch(config, 1, records, {0: "a prompt", 1: "another"})
    return batch, metrics


def test_each_sequence_gets_the_advantage_of_its_sample() -> None:
    table, _ = batch_with(grpo_config(), records_of())
    expected = group_advantages(np.array(REWARDS), leave_one_out=True, normalize=True).reshape(-1)
    np.testing.assert_array_equal(table.advantages_S, expected)
    assert table.advantages_S.dtype == np.float32
    assert table.lengths_S.tolist() == [3, 4, 5, 6, 7, 8]
    assert table.num_valid_S.tolist() == [1, 2, 3, 4, 5, 6]
    assert table.prompt_S.tolist() == [0, 0, 0, 3, 3, 3]
    assert table.source_S.tolist() == [0, 1] * 3
    assert table.command_S.tolist() == [7, 8, 9, 10, 11, 12]


def test_the_metrics_describe_the_samples() -> None:
    _, metrics = batch_with(grpo_config(), records_of())
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
    with pytest.raises(AssertionError, match="order"):
        batch_with(grpo_config(), records_of()[::-1])


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reward", "expected"), [(0.0, -1.0), (1.0, 1.0), (0.25, -0.5), (-3.0, -1.0), (7.0, 1.0)])
def test_scaling_is_linear_and_clamps(reward: float, expected: float) -> None:
    settings = RewardScaling(enabled=True, source_min=0.0, source_max=1.0, target_min=-1.0, target_max=1.0)
    assert scale(np.array([reward]), settings).tolist() == pytest.approx([expected])
    assert scale(np.array([reward]), RewardScaling(target_max=9.0)).tolist() == [reward]


@pytest.mark.parametrize(("length", "loss"), [(1, 0.0), (80, 0.0), (85, 0.125), (90, 0.25), (100, 0.5), (120, 0.5)])
def test_soft_overlong_punishment(length: int, loss: float) -> None:
    # DAPO, equation 13, with L = 100, C = 20 and a penalty of 0.5.
    settings = RewardShaping(
        enabled=True, max_response_length=100, overlong_buffer_length=20, overlong_buffer_penalty=0.5
    )
    found = shape(np.array([1.0]), np.array([length]), np.array([False]), settings)
    assert found.tolist() == pytest.approx([1.0 - loss])


def test_samples_that_did_not_stop_properly_keep_a_share_of_their_reward() -> None:
    settings = RewardShaping(enabled=True, stop_properly_penalty_coef=0.25)
    found = shape(np.array([1.0, -2.0, 1.0]), np.array([9, 9, 9]), np.array([True, True, False]), settings)
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
    batch, metrics = batch_with(config, records_of())
    # 1, 2, 6 become 5, 10, 10; the last three, of 4, 5 and 6 tokens, lose 2, 4 and 4.
    trained = np.array([[5.0, 10.0, 10.0], [0.5, -1.5, -1.5]])
    expected = group_advantages(trained, leave_one_out=True, normalize=True).reshape(-1)
    np.testing.assert_allclose(batch.advantages_S, expected)
    assert metrics["training_reward"] == pytest.approx(trained.mean())
    assert metrics["reward"] == pytest.approx(np.mean(REWARDS)), "the environment's, comparable between runs"


def test_a_sample_that_was_cut_off_counts_in_the_baseline_but_not_in_the_loss() -> None:
    records = records_of([[1.0, 2.0, 6.0], [0.0, 0.0, 1.0]])
    plain, _ = batch_with(grpo_config(), records)
    filtered, metrics = batch_with(with_grpo(overlong_filtering=True), records)
    np.testing.assert_array_equal(filtered.advantages_S, plain.advantages_S)
    assert filtered.num_valid_S.tolist() == [*plain.num_valid_S[:-1].tolist(), 0]
    assert filtered.prompt_S.tolist() == [0, 0, 0, 3, 3, NO_PROMPT]
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
        batch, _ = batch_with(with_grpo(adv_estimator=estimator), records_of())
        np.testing.assert_array_equal(batch.advantages_S, expected)


@pytest.mark.parametrize(
    ("minus_baseline", "expected"), [(True, [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]), (False, [1.0, 2.0, 6.0, 0.5, 0.5, 0.5])]
)
def test_reinforce_plus_plus_leaves_normalising_to_the_trainer(minus_baseline: bool, expected: list[float]) -> None:
    estimator = AdvEstimator(name="reinforce_plus_plus", minus_baseline=minus_baseline)
    batch, _ = batch_with(with_grpo(adv_estimator=estimator), records_of())
    assert batch.advantages_S.tolist() == expected


@pytest.mark.parametrize("estimator", ["grpo", "gdpo"])
def test_advantages_are_clipped_once_they_are_normalised(estimator: str) -> None:
    bounds = {"advantage_clip_low": -0.25, "advantage_clip_high": 0.5}
    records = gdpo_records()
    records[0] = msgspec.structs.replace(records[0], scored=msgspec.structs.replace(records[0].scored, dropped=True))
    settings = AdvEstimator(name=estimator)  # type: ignore[arg-type]
    free, _ = batch_with(with_grpo(adv_estimator=settings), records)
    batch, _ = batch_with(with_grpo(adv_estimator=settings, **bounds), records)
    assert free.advantages_S.min() < -0.25 < 0.5 < free.advantages_S.max()
    np.testing.assert_array_equal(batch.advantages_S, np.clip(free.advantages_S, -0.25, 0.5))
    batch, _ = batch_with(with_grpo(adv_estimator=settings, advantage_clip_low=0.1), records)
    assert batch.advantages_S[0] == 0, "one that counts nowhere is left alone"
    assert batch.advantages_S[1:].min() == np.float32(0.1)


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
    np.testing.assert_allclose(decouple_advantages(rewards_GNC, settings), expected, rtol=1e-5, atol=1e-6)


def test_groups_that_grpo_takes_for_alike_are_told_apart_by_gdpo() -> None:
    """The paper's example, figure 2: one sample has one component more than the other, or two."""
    rewards_GNC = np.array([[(0.0, 0.0), (0.0, 1.0)], [(0.0, 0.0), (1.0, 1.0)]])
    plain = advantages(rewards_GNC.sum(axis=2).tolist(), leave_one_out=False)
    np.testing.assert_allclose(plain, [[-1, 1], [-1, 1]], rtol=1e-5)
    decoupled = decouple_advantages(rewards_GNC, AdvEstimator(name="gdpo", use_leave_one_out_baseline=False))
    np.testing.assert_allclose(decoupled[1], 2 * decoupled[0], rtol=1e-5)


def gdpo_records() -> list[SampleRecord]:
    parts = [component for group in COMPONENTS for component in group]
    return [
        msgspec.structs.replace(
            record, scored=msgspec.structs.replace(record.scored, components={"short": short, "right": right})
        )
        for record, (right, short) in zip(records_of(), parts, strict=True)
    ]


def test_the_components_of_a_batch() -> None:
    estimator = AdvEstimator(name="gdpo", reward_weights=(1.0, 0.25))
    scaling = RewardScaling(enabled=True, source_max=10.0)
    batch, metrics = batch_with(with_grpo(adv_estimator=estimator, reward_scaling=scaling), gdpo_records())
    expected = decouple_advantages(np.array(COMPONENTS) / 10, estimator).reshape(-1)
    np.testing.assert_allclose(batch.advantages_S, expected, rtol=1e-6)
    assert (metrics["reward/right"], metrics["reward/short"]) == (0.5, 1.0)


def test_gdpo_needs_components_and_a_weight_for_each() -> None:
    config = with_grpo(adv_estimator=AdvEstimator(name="gdpo"))
    with pytest.raises(RewardError, match=r"at least two components, environment 'reasoning_gym' gave none$"):
        batch_with(config, records_of())
    config = with_grpo(adv_estimator=AdvEstimator(name="gdpo", reward_weights=(1.0,)))
    with pytest.raises(RewardError, match=r"reward_weights: 1 weights, but .* gave right, short$"):
        batch_with(config, gdpo_records())


# --- samples that are dropped ----------------------------------------------------------------------------------------


def with_failures(records: list[SampleRecord], numbers: Sequence[int]) -> list[SampleRecord]:
    """Return samples of which these were dropped, with a reward that must not count."""
    return [
        changed(record, failure="why", timed_out=number == 0, dropped=True, reward=99.0, correct=True)
        if number in numbers
        else record
        for number, record in enumerate(records)
    ]


def changed(record: SampleRecord, **changes: Any) -> SampleRecord:
    return msgspec.structs.replace(record, scored=msgspec.structs.replace(record.scored, **changes))


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_dropped_sample_does_not_train_and_is_in_nobodys_baseline(leave_one_out: bool, normalize: bool) -> None:
    estimator = AdvEstimator(normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)
    rewards = [[1.0, 0.0, 6.0], [2.0, 0.0, 0.0]]
    records = records_of(rewards)
    batch, metrics = batch_with(with_grpo(adv_estimator=estimator), with_failures(records, [1, 4, 5]))
    # Of the first group 1 and 6 are left: each is the other's baseline, or 3.5 is both's. Of the second only one is.
    if leave_one_out:
        first, last = -5.0, 5.0  # a baseline of one sample has no deviation to divide by
    elif normalize:
        first, last = -2.5 / (2.5 + EPSILON), 2.5 / (2.5 + EPSILON)
    else:
        first, last = -2.5, 2.5
    assert batch.advantages_S.tolist() == pytest.approx([first, 0.0, last, 0.0, 0.0, 0.0])
    assert batch.num_valid_S.tolist() == [1, 0, 3, 4, 0, 0]
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
    records = records_of()
    batch, _ = batch_with(with_grpo(adv_estimator=estimator), with_failures(records, [1, 4, 5]))
    assert batch.advantages_S.tolist() == expected


def test_gdpo_compares_and_normalises_over_what_is_left() -> None:
    estimator = AdvEstimator(name="gdpo", normalize_rewards=False, use_leave_one_out_baseline=False)
    records = gdpo_records()
    batch, metrics = batch_with(with_grpo(adv_estimator=estimator), with_failures(records, [2, 4, 5]))
    # Left are (1, 0) and (0, 5): 0.5 - 2.5 and -0.5 + 2.5, of mean 0 and deviation sqrt(8); and one with nobody beside.
    assert batch.advantages_S.tolist() == pytest.approx([-2 / math.sqrt(8), 2 / math.sqrt(8), 0.0, 0.0, 0.0, 0.0])
    assert (metrics["reward/right"], metrics["reward/short"]) == pytest.approx((2 / 3, 2.0))


def test_a_step_of_which_everything_was_dropped_has_no_rewards_and_trains_nothing() -> None:
    records = records_of()
    scaling = RewardScaling(enabled=True)
    batch, metrics = batch_with(with_grpo(reward_scaling=scaling), with_failures(records, range(6)))
    assert not batch.num_valid_S.any()
    assert not batch.advantages_S.any()
    assert not {"reward", "reward_std", "accuracy", "training_reward"} & metrics.keys()
    assert metrics["groups_without_spread"] == 1.0
    assert (metrics["environment_failures"], metrics["environment_timeouts"]) == (6.0, 1.0)


def test_a_failure_that_is_worth_nothing_is_a_sample_like_others() -> None:
    records = records_of()
    failed = [changed(record, failure="why") for record in records]
    batch, metrics = batch_with(grpo_config(), failed)
    plain, usual = batch_with(grpo_config(), records)
    np.testing.assert_array_equal(batch.advantages_S, plain.advantages_S)
    np.testing.assert_array_equal(batch.num_valid_S, plain.num_valid_S)
    assert metrics == usual | {"environment_failures": 6.0, "environment_timeouts": 0.0, "environment_dropped": 0.0}


def test_dropped_samples_make_no_spread() -> None:
    records = records_of()[:3]
    for dropped, expected in (([], True), ([2], True), ([0], True), ([0, 1], False), ([0, 1, 2], False)):
        assert has_spread(grpo_config().grpo, scored_of(with_failures(records, dropped))) is expected
    alike = [changed(record, reward=1.0) for record in records]
    assert not has_spread(grpo_config().grpo, scored_of(with_failures(alike, [1])))


def scored_of(records: list[SampleRecord]) -> list[SampleScored]:
    return [record.scored for record in records]
