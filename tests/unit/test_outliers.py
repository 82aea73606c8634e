"""Advantages, losses and gradient norms out of all proportion: named with their sample, and set aside by a key.

The input is the smallest of its kind: rewards that differ by 1e-4 among three samples, where the fourth succeeds. By
NeMo-RL v0.7's formula (`calculate_baseline_and_std_per_prompt`) its advantage is thousands of times that of others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from diagnosis_harness import config_of, evidence_of, found_in
from samples_harness import scored

from tandem.common.numeric import FACTOR, PHRASE, RecentSteps, find_outliers, find_usual_size
from tandem.config import Config, build_config
from tandem.coordinator.algorithms.step_batch import training_batch
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.observe.diagnosis.optimisation import find_outlying_steps
from tandem.samples.batch import SampleBatch

NEARLY_EQUAL = [0.8, 0.8001, 0.8, 1.0]
REWARDS = [[1.0, 0.0, 0.0, 1.0], NEARLY_EQUAL, [0.0, 1.0, 1.0, 0.0]]


def batch_of(rewards: list[list[float]], **grpo: Any) -> tuple[SampleBatch, dict[str, float]]:
    config = config_with(len(rewards), **grpo)
    records = [
        SampleRecord(scored(group, place, reward=reward, prompt_length=2, response_length=3), "rollout-0", 1)
        for group, row in enumerate(rewards)
        for place, reward in enumerate(row)
    ]
    prompts = {group: group for group in range(len(rewards))}
    return training_batch(config, 1, records, prompts, lambda group: f"sums/{group}")


def config_with(num_groups: int, **grpo: Any) -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": num_groups, "num_generations_per_prompt": 4, **grpo},
            "policy": {"model_name": "m", "train_global_batch_size": 4 * num_groups, "train_micro_batch_size": 4},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


def test_an_advantage_out_of_proportion_is_named_with_its_sample_and_trained_on() -> None:
    batch, metrics = batch_of(REWARDS)
    advantage = batch.advantages_S[7]
    assert advantage > 4_000
    assert metrics["advantage_outliers"] == 1
    assert batch.num_valid_S.tolist() == [3] * 12
    (note,) = batch.notes
    assert note.startswith(f"group 1 (problem sums/1), sample 3: an advantage of {advantage:.4g} is {PHRASE}: ")
    assert (
        "its reward is 1, and those of its group are 0.8 to 1 (grpo.set_aside_outliers sets such groups aside)" in note
    )


def test_the_key_sets_its_group_aside_as_if_it_had_not_been_there() -> None:
    batch, metrics = batch_of(REWARDS, set_aside_outliers=True)
    others, _ = batch_of([REWARDS[0], REWARDS[2]])
    assert metrics["groups_set_aside/advantages"] == 1
    assert batch.num_valid_S.tolist() == [3] * 4 + [0] * 4 + [3] * 4
    assert batch.advantages_S[[*range(4), *range(8, 12)]].tolist() == others.advantages_S.tolist()
    assert not batch.advantages_S[4:8].any()
    (note,) = batch.notes
    assert note.endswith("(groups with such a sample are set aside)")


@pytest.mark.parametrize("set_aside", [False, True])
@pytest.mark.parametrize(
    "rewards",
    [
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.5, 0.25, 0.1, 1.0]],
        [[0.8, 0.7 + 0.1, 0.8, 1.0], [1.0, 0.0, 0.0, 1.0]],
        [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]],
    ],
)
def test_of_usual_advantages_nothing_is_said(rewards: list[list[float]], set_aside: bool) -> None:
    batch, metrics = batch_of(rewards, set_aside_outliers=set_aside)
    assert not batch.notes
    assert "advantage_outliers" not in metrics
    assert batch.num_valid_S.all()


def test_outliers_are_relative_to_the_others_and_may_be_several() -> None:
    random = np.random.default_rng(0).standard_normal(100)
    for size in (1e-6, 1.0, 1e6):
        numbers = np.concatenate([size * random, [size * 1e4] * 20])
        assert find_outliers(numbers).tolist() == [False] * 100 + [True] * 20
    assert not find_outliers(np.array([1e9, 1.0])).any(), "two numbers have no neighbours"
    assert not find_outliers(np.zeros(9)).any()
    assert find_usual_size(np.array([0.0, 2.0, -1.0, 3.0, 0.0])) == 2.0


def test_a_step_is_compared_with_the_last_ones() -> None:
    recent = RecentSteps()
    for number in range(4):
        recent.add(0.01 * number, 2.0)
        assert not recent.excess(1e9, 1e9), "too few to compare with"
    recent.add(0.01, 2.0)
    assert recent.excess(0.1, 450_000) == (
        f"a gradient norm of 4.5e+05 is {PHRASE}: 225,000 times the usual 2 of the last 5 optimizer steps"
    )
    assert recent.excess(-8304, 2.0).startswith(f"a loss of 8304 is {PHRASE}: 8,304 times the usual 1 ")
    assert not recent.excess(0.5, FACTOR * 2.0), "losses on the policy's own samples are about 0"
    again = RecentSteps(recent.grad_norms, recent.losses)
    assert again.excess(0.1, 450_000) == recent.excess(0.1, 450_000)


def test_a_new_level_is_usual_after_a_while() -> None:
    recent = RecentSteps([1.0] * 20, [0.0] * 20)
    said = []
    for _ in range(20):
        said.append(bool(recent.excess(0.0, 1e3)))
        recent.add(0.0, 1e3)
    assert said[0]
    assert not said[-1]


# --- the diagnosis ---------------------------------------------------------------------------------------------------


def test_a_diagnosis_finds_the_named_sample() -> None:
    line = f"step 7: group 1, sample 3: an advantage of 4243 is {PHRASE}: 4,243 times the usual 1 of the step"
    finding = find_outlying_steps(evidence_of(*[{}] * 12, events=(line,)))
    assert finding is not None
    assert (finding.since, finding.evidence) == (7, (line,))
    assert "learning rate too large" in finding.explains
    assert finding.look_at.startswith("grpo.set_aside_outliers, ")


SPIKE = [{}] * 8 + [{"grad_norm": 45_000.0}] + [{}] * 3


def test_without_names_it_goes_by_the_metrics() -> None:
    finding = find_outlying_steps(evidence_of(*SPIKE))
    assert finding is not None
    assert finding.since == 9
    assert finding.evidence == (
        f"step 9: a gradient norm of 4.5e+04 is {PHRASE}: 150,000 times the usual 0.3 of the last 8 steps",
    )


def test_a_gradient_that_stays_large_has_grown() -> None:
    assert find_outlying_steps(evidence_of(*[{}] * 8, *[{"grad_norm": 45_000.0}] * 20)) is None


def test_the_check_is_one_of_the_diagnosis() -> None:
    assert "numbers out of proportion" in found_in(evidence_of(*SPIKE))
    assert "numbers out of proportion" not in found_in(evidence_of(*[{}] * 12))
    assert not config_of().grpo.set_aside_outliers, "they are named, and trained on"
