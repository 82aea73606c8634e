"""Runs in which the environment answers: resumed, over two engines, and the examples that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.running import coordinator, copy_examples, steps_of, weights_of, write_config

TALKS = """
import time
from tandem.rollout.environments import Score, Turn

class Talks:
    '''Answers twice, after a time of its own; every digit of the policy's is worth a tenth.'''

    def step(self, problem, conversation):
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        time.sleep(0.002 * (len(said[-1]) % 3))
        reward = 0.1 * sum(character.isdigit() for character in said[-1])
        if len(said) == 3:
            return Score(reward, correct=reward > 0.2)
        return Turn([{"role": "user", "content": f"{len(said)}+1"}], reward)
"""
CONVERSING: dict[str, Any] = {
    "grpo": {"max_num_steps": 4, "max_rollout_turns": 3},
    "env": {"mine": {"class": "talking.Talks", "num_workers": 2}},
}


@pytest.fixture(autouse=True)
def talking() -> None:
    Path("talking.py").write_text(TALKS)


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith(("_per_s", "_gb"))}


def test_a_resumed_run_of_several_turns_equals_an_uninterrupted_one_to_the_bit() -> None:
    config = write_config(CONVERSING)
    whole = coordinator("up", config, "logger.log_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    first = coordinator("up", config, "grpo.max_num_steps=2")
    assert first.returncode == 0, first.stderr
    second = coordinator("up", config, "--resume")
    assert second.returncode == 0, second.stderr
    assert weights_of("run/checkpoints/step_4") == weights_of("whole/checkpoints/step_4")
    resumed, uninterrupted = steps_of("run"), steps_of("whole")
    assert [s.step for s in resumed] == [1, 2, 3, 4]
    for a, b in zip(resumed, uninterrupted, strict=True):
        assert untimed(a.metrics) == untimed(b.metrics)
    for step in resumed:
        # Three turns unless the sequence was full before; the engine's log-probabilities are the trainer's.
        assert 1 < step.metrics["avg_turns_per_sample"] <= 3
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert "val_avg_turns_per_sample" in resumed[1].metrics


def test_two_engines_say_what_one_says() -> None:
    config = write_config(CONVERSING | {"grpo": {"max_num_steps": 1, "max_rollout_turns": 2}})
    for name, count in (("one", 1), ("two", 2)):
        ended = coordinator("up", config, f"cluster.rollouts={count}", f"logger.log_dir={name}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    one, two = steps_of("one")[0].metrics, steps_of("two")[0].metrics
    assert one["max_turns_reached_rate"] > 0
    for name in (
        "reward",
        "avg_turns_per_sample",
        "max_turns_reached_rate",
        "mean_generation_length",
        "loss",
        "grad_norm",
    ):
        assert two[name] == pytest.approx(one[name], abs=1e-5), name


@pytest.mark.parametrize("name", ["calculator", "sliding_puzzle"])
def test_the_examples_run(name: str) -> None:
    copy_examples()
    ended = coordinator(
        "up",
        f"examples/{name}.yaml",
        "grpo.max_num_steps=1",
        "grpo.num_prompts_per_step=4",
        "grpo.max_val_samples=4",
        "policy.train_global_batch_size=32",
        "policy.train_micro_batch_size=32",
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    first, second = steps_of(f"results/{name}")
    assert first.metrics["val_avg_turns_per_sample"] >= 1
    assert second.metrics["avg_turns_per_sample"] >= 1
    assert 0 <= second.metrics["max_turns_reached_rate"] <= 1
