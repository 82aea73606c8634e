"""Losses, rewards and dynamic sampling together, through the console commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.samples.recorded_shards import read_step
from tests.harness.runs.running import coordinator, deterministic, steps_of, weights_of, write_config

NUM_PROBLEMS = 64
JUDGE = """
from tandem.rollout.environments import Score

class Judge:
    def score(self, problem, response):
        components = {"has_one": float("1" in response), "begins_low": float(response[:1] in set("01234"))}
        return Score(components["has_one"], correct=components["has_one"] > 0, components=components)
"""
DAPO: dict[str, Any] = {
    "env": {"mine": {"class": "judging.Judge"}},
    "grpo": {
        "max_num_steps": 4,
        "use_dynamic_sampling": True,
        "batch_multiplier": 1.25,
        "overlong_filtering": True,
        "reward_scaling": {"enabled": True, "target_min": -1.0},
        "reward_shaping": {
            "enabled": True,
            "max_response_length": 6,
            "overlong_buffer_length": 4,
            "overlong_buffer_penalty": 0.5,
        },
    },
    "loss_fn": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.28,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    },
    "policy": {"train_global_batch_size": 8},
    "logger": {"samples": "all"},
}


def drawn_problems(folder: str) -> list[str]:
    """Return the problems that all batches of groups have drawn, in the order of drawing."""
    problems: list[str] = []
    for step in steps_of(folder):
        groups = {one.scored.group: one.problem_id for one in read_step(Path(folder) / "samples", step.step)}
        assert len(groups) == 5 * step.metrics["dynamic_sampling_num_gen_batches"]
        problems += [groups[group] for group in sorted(groups)]
    return problems


def test_dynamic_sampling_with_gspo_resumes_to_the_bit() -> None:
    Path("judging.py").write_text(JUDGE)
    config = write_config(DAPO)
    whole = coordinator("up", config, "logger.log_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    steps = steps_of("whole")
    metrics = [step.metrics for step in steps]
    assert all(m["num_valid_samples"] <= 16 for m in metrics), "what was cut off does not count"
    assert sum(m["dynamic_sampling_num_dropped_groups"] for m in metrics) > 0
    assert max(m["dynamic_sampling_num_gen_batches"] for m in metrics) > 1, "a batch was not enough"
    for m in metrics:
        generated = 5 * m["dynamic_sampling_num_gen_batches"]
        discarded = m["dynamic_sampling_num_discarded_valid_samples"] / 4
        assert generated - m["dynamic_sampling_num_dropped_groups"] - discarded == 4
        assert m["groups_without_spread"] == pytest.approx(m["dynamic_sampling_num_dropped_groups"] / generated)
        assert m["is_oob_ratio"] == 0, "engine and trainer agree"

    for last, flags in ((2, ()), (4, ("--resume",))):
        ended = coordinator("up", config, f"grpo.max_num_steps={last}", *flags)
        assert ended.returncode == 0, ended.stderr
    assert weights_of("run/checkpoints/step_4") == weights_of("whole/checkpoints/step_4")
    problems = drawn_problems("whole")
    first_epoch = problems[:NUM_PROBLEMS]
    assert len(set(first_epoch)) == len(first_epoch), "each batch continues the data where the one before stopped"
    assert drawn_problems("run") == problems
    for one, other in zip(steps_of()[2:], steps[2:], strict=True):
        assert deterministic(one.metrics) == deterministic(other.metrics)


def test_gdpo_takes_the_components_of_an_environment() -> None:
    Path("judging.py").write_text(JUDGE)
    grpo = {"max_num_steps": 2, "adv_estimator": {"name": "gdpo", "reward_weights": [1.0, 0.5]}}
    loss = {"use_cispo": True, "reference_policy_kl_penalty": 0.01, "use_on_policy_kl_approximation": True}
    ended = coordinator("up", write_config({"env": DAPO["env"], "grpo": grpo, "loss_fn": loss}))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for step in steps_of():
        assert step.metrics["reward/has_one"] == step.metrics["reward"]
        assert 0 < step.metrics["reward/begins_low"] < 1
        assert step.metrics["grad_norm"] > 0
