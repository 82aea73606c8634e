"""Runs in which a number is absurd but finite: what has it is set aside and named, and the run goes on."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import absurd_rollout
from tests.harness.runs.running import (
    TIMEOUT_S,
    Command,
    all_gone,
    coordinator,
    joins,
    merged,
    steps_of,
    weights_of,
    write_config,
)

EIGHT: dict[str, Any] = {
    "grpo": {"max_num_steps": 8, "val_period": 0},
    "checkpointing": {"save_period": 4, "metric_name": "reward"},
    "cluster": {"trainers": 2, "max_replacements": 1},
}
BY_HAND = {"cluster": {"launch": {"trainers": 2, "refit": True}}}
NAMED = (
    r"step 5: group (\d), sample \d of rollout-0 has a log-probability of -100 for a token that was drawn, below -40, "
    r"which is as far as float32 carries: group \1 is set aside"
)


def assert_set_aside(run: str) -> None:
    """Assert that one group of step 5 was not trained on, and all others were."""
    steps = {step.step: step.metrics for step in steps_of(run)}
    assert [*steps] == [*range(1, 9)]
    assert {
        number: each["groups_set_aside/logprobs"] for number, each in steps.items() if each["num_valid_samples"] < 16
    } == {5: 1}
    assert steps[5]["num_valid_samples"] == 12
    assert all(math.isfinite(value) for metrics in steps.values() for value in metrics.values())


def test_a_log_probability_of_minus_100_sets_its_group_aside_and_again_at_resume_and_in_a_replay() -> None:
    with Command("coordinator", "up", write_config(merged(EIGHT, BY_HAND))) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command(absurd_rollout.__name__, "4:-100", *joins(address)):
            run.wait_for(NAMED)
            run.wait_for("step 5/8")
            services = run.children()
            run.signal(signal.SIGKILL)
            run.wait()
    all_gone(services, TIMEOUT_S)
    assert "is lost" not in run.output()
    assert len(re.findall(NAMED, run.output())) == 1
    resumed = coordinator("up", write_config(EIGHT), "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert_set_aside("run")
    replayed = coordinator("replay", "run")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert re.search(NAMED.replace("rollout-0", "record"), replayed.stdout), replayed.stdout
    assert_set_aside("run-replay")
    assert weights_of("run-replay/checkpoints/latest") == weights_of("run/checkpoints/latest")


PRICES = """
import json
from tandem.rollout.environments import Score

ABSURD = {1: 1e39, 2: 1e308, 3: float("nan"), 4: float("inf"), 5: float("-inf"), 6: -2e12, 7: 10**400}

class Judge:
    def __init__(self):
        self._calls = 0

    def score(self, problem, response):
        self._calls += 1
        return Score(ABSURD.get(self._calls, 0.1 * len(response)), correct=False)
"""


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_absurd_rewards_are_failures_of_the_environment(on_error: str) -> None:
    Path("judging.py").write_text(PRICES)
    over = {"env": {"mine": {"class": "judging.Judge", "on_error": on_error, "num_workers": 1}}}
    ended = coordinator("up", write_config(merged(over, {"grpo": {"max_num_steps": 1, "val_period": 0}})))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (step,) = steps_of()
    assert step.metrics["environment_failures"] == 7
    assert step.metrics["num_valid_samples"] == 16 - (7 if on_error == "drop" else 0)
    assert re.search(
        r"environment 'mine', problem '.+': the reward is 1e\+39, not a number from -1e\+12 to 1e\+12; the sample",
        ended.stdout,
    )


BONUS = """
from tandem.rollout.environments import Score

class Judge:
    def __init__(self):
        self._calls = 0

    def score(self, problem, response):
        self._calls += 1
        return Score(0.1 * len(response), correct=False, components={"bonus": -1.0 if self._calls == 20 else 1.0})
"""
LOGARITHM = """
from tandem.trainer.losses import aggregate

class Logarithm:
    def __init__(self, settings, counts, device):
        self._counts = counts

    def __call__(self, batch, scores):
        weighted_BT = -batch.advantages_BT * batch.columns["bonus"].log() * scores.logprobs - scores.logprobs
        return aggregate(weighted_BT, batch.loss_mask_BT, self._counts, token_level=True)
"""


def test_a_loss_that_one_sample_makes_infinite_is_taken_without_its_group() -> None:
    Path("judging.py").write_text(BONUS)
    Path("logarithm.py").write_text(LOGARITHM)
    over = {
        "env": {"mine": {"class": "judging.Judge", "num_workers": 1}},
        "loss_fn": {"class": "logarithm.Logarithm", "columns": {"bonus": {"source": "environment"}}},
        "grpo": {"max_num_steps": 3, "val_period": 0},
    }
    ended = coordinator("up", write_config(over))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = steps_of()
    assert [step.metrics.get("groups_set_aside/loss") for step in steps] == [None, 1, None]
    assert [step.metrics["num_valid_samples"] for step in steps] == [16, 12, 16]
    said = r"step 2: group (\d), sample \d has a loss or gradient that is no finite number: group \1 is set aside"
    assert len(re.findall(said, ended.stdout)) == 1, ended.stdout
