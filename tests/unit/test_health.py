"""What is said of a run that learns nothing, step by step; and what is not said of one that learns."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config import Config, build_config
from tandem.observe.health import HIGH_PROBABILITY_ERROR, LOW_ENTROPY, NUM_STEPS, RunHealth, conditions

WELL = {
    "reward": 0.4,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "groups_without_spread": 0.5,
    "truncated_fraction": 0.25,
    "entropy": 0.6,
    "token_mult_prob_error": 1.01,
    "grad_norm": 0.3,
    "learning_rate": 1e-6,
    "num_valid_tokens": 512.0,
}
"""Metrics of a step of GRPO that learns."""


def config_of(algorithm: str = "grpo", *, policy: dict[str, Any] | None = None, **sections: Any) -> Config:
    settings = {
        "algorithm": algorithm,
        "policy": {"model_name": "model", "generation": {"max_new_tokens": 64}, **(policy or {})},
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "no"},
        **sections,
    }
    return build_config(settings)


def said(config: Config, *steps: dict[str, float]) -> list[list[str]]:
    """What is said after each step; metrics that are not given are those of a run that learns."""
    health = RunHealth(conditions(config))
    return [health.warnings(WELL | step) for step in steps]


CONDITIONS: dict[str, tuple[dict[str, float], dict[str, float], tuple[str, ...]]] = {
    "equal rewards": (
        {"reward": 0.5, "reward_min": 0.5, "reward_max": 0.5, "groups_without_spread": 1.0, "grad_norm": 0.0},
        {"reward_min": 0.4},
        ("all rewards of a step have been equal, at last 0.5", "env.reasoning_gym", "data.prompt_template"),
    ),
    "no spread": (
        {"groups_without_spread": 1.0, "grad_norm": 0.0},
        {"groups_without_spread": 0.99},
        ("same reward", "0.4 at last", "grpo.num_generations_per_prompt", "policy.generation.temperature"),
    ),
    "truncated": (
        {"truncated_fraction": 1.0},
        {"truncated_fraction": 0.99},
        ("cut off at its limit of 64 tokens", "policy.generation.max_new_tokens"),
    ),
    "entropy": (
        {"entropy": LOW_ENTROPY / 2},
        {"entropy": LOW_ENTROPY},
        ("entropy has been below 0.01 nats", "at last 0.005", "loss_fn.ratio_clip_max"),
    ),
    "disagreement": (
        {"token_mult_prob_error": HIGH_PROBABILITY_ERROR + 0.1},
        {"token_mult_prob_error": HIGH_PROBABILITY_ERROR},
        ("by a factor of 1.2", "policy.precision", "loss_fn.use_importance_sampling_correction"),
    ),
    "disagreement without bounds": (
        {"token_mult_prob_error": float("nan")},
        {"token_mult_prob_error": 1.0},
        ("by a factor of nan", "policy.precision"),
    ),
    "gradient": (
        {"grad_norm": 0.0, "num_valid_tokens": 0.0},
        {"grad_norm": 1e-9},
        ("the gradient has been 0, at last with 0 tokens in the loss", "grpo.overlong_filtering"),
    ),
    "learning rate": (
        {"learning_rate": 0.0},
        {"learning_rate": 1e-12},
        ("the learning rate has been 0", "policy.optimizer.kwargs.lr and policy.scheduler"),
    ),
}


@pytest.mark.parametrize(("bad", "good", "words"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_condition_is_said_once_until_it_clears(
    bad: dict[str, float], good: dict[str, float], words: tuple[str, ...]
) -> None:
    *before, last = said(config_of(), *[bad] * NUM_STEPS)
    assert before == [[]] * (NUM_STEPS - 1)
    (line,) = last
    assert line.startswith(f"warning: for {NUM_STEPS} steps ")
    assert all(word in line for word in words), line
    assert words[-1] in line.partition("; look at ")[2], "the keys come last"
    # Not again while it goes on; again when it has cleared and come back.
    assert said(config_of(), *[bad] * 3 * NUM_STEPS)[NUM_STEPS:] == [[]] * 2 * NUM_STEPS
    again = said(config_of(), *[bad] * NUM_STEPS, good, *[bad] * NUM_STEPS)
    assert [len(lines) for lines in again] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert again[-1] == last


@pytest.mark.parametrize(("bad", "good", "words"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_step_in_between_at_the_threshold_says_that_all_is_well(
    bad: dict[str, float], good: dict[str, float], words: tuple[str, ...]
) -> None:
    few = [bad] * (NUM_STEPS - 1)
    rest = {name: WELL[name] for name in bad}
    assert said(config_of(), *few, rest | good, *few, rest | good, *few) == [[]] * (3 * NUM_STEPS - 1)
    assert said(config_of(), *[good] * 3 * NUM_STEPS) == [[]] * 3 * NUM_STEPS


def test_a_step_without_a_metric_that_the_evidence_names_is_ignored() -> None:
    health = RunHealth(conditions(config_of()))
    for metrics in ({"grad_norm": 0.0}, {"reward_max": 1.0}):  # as where a front end's clients train
        assert [health.warnings(metrics) for _ in range(2 * NUM_STEPS)] == [[]] * 2 * NUM_STEPS


def test_of_a_run_that_learns_nothing_is_said() -> None:
    assert said(config_of(), *[{}] * 50) == [[]] * 50


def test_a_cause_that_clears_leaves_what_it_explained_to_be_said() -> None:
    equal, spread, _ = (bad for bad, _, _ in list(CONDITIONS.values())[:3])
    lines = said(config_of(), *[equal] * NUM_STEPS, spread)
    assert ["all rewards" in line for line in lines[NUM_STEPS - 1]] == [True]
    assert ["same reward" in line for line in lines[NUM_STEPS]] == [True]
    assert lines[NUM_STEPS][0].startswith(f"warning: for {NUM_STEPS + 1} steps ")


def test_a_step_that_does_not_report_a_metric_says_nothing_of_it() -> None:
    health = RunHealth(conditions(config_of()))
    for _ in range(NUM_STEPS - 1):
        assert health.warnings({"entropy": 0.0}) == []
        assert health.warnings({"val_loss": 1.0}) == []
    assert len(health.warnings({"entropy": 0.0})) == 1


def test_entropy_of_a_step_without_a_token_in_the_loss_says_nothing() -> None:
    """As where an agent crashed before it asked for anything, or every response was cut off and filtered."""
    health = RunHealth(conditions(config_of()))
    for _ in range(NUM_STEPS):
        said = health.warnings({"entropy": 0.0, "num_valid_tokens": 0.0})
        assert not [line for line in said if "entropy" in line]


def test_where_rewards_need_no_spread_none_is_missed() -> None:
    bad, _, _ = CONDITIONS["no spread"]
    bad = bad | {"grad_norm": 0.3}
    over_the_batch = {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}}
    assert said(config_of(grpo=over_the_batch), *[bad] * NUM_STEPS)[-1] == []
    shaped = {"reward_shaping": {"enabled": True, "stop_properly_penalty_coef": 0.5}}
    assert said(config_of(grpo=shaped), *[bad] * NUM_STEPS)[-1] == []
    assert len(said(config_of(), *[bad] * NUM_STEPS)[-1]) == 1


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_over_data_sets_only_the_training_is_looked_at(algorithm: str) -> None:
    every = {name: value for bad, _, _ in CONDITIONS.values() for name, value in bad.items()}
    lines = said(config_of(algorithm), *[every] * NUM_STEPS)[-1]
    assert len(lines) == 2
    assert "policy.optimizer.kwargs.lr" in lines[0]
    assert f"look at data, whose loss masks say what is learned, and {algorithm}" in lines[1]


def test_keys_are_those_of_the_backends_in_use() -> None:
    megatron = {"optimizer": None, "megatron_cfg": {"enabled": True, "optimizer": {"lr": 0.0}}}
    (line,) = said(config_of(policy=megatron), *[{"learning_rate": 0.0}] * NUM_STEPS)[-1]
    assert line.endswith("look at policy.megatron_cfg.optimizer.lr and policy.megatron_cfg.scheduler")
    vllm = {"generation": {"max_new_tokens": 64, "backend": "vllm"}}
    (line,) = said(config_of(policy=vllm), *[{"token_mult_prob_error": 2.0}] * NUM_STEPS)[-1]
    assert "policy.generation.vllm_cfg.precision" in line
