"""A run whose data sets go to environments of their own, one of which answers; resumed to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.running import SUMS, coordinator, deterministic, steps_of, write_config

DOUBT = """
from tandem.rollout.environments import Score, Turn

class Doubt:
    '''Asks again, and then is content with anything but a sum of two digits that it does not know.'''

    def step(self, problem, conversation):
        assert len(problem.question) > 5, problem.question
        if len(conversation) == 1:
            return Turn([{"role": "user", "content": "="}], reward=0.5)
        return Score(reward=0.25, correct=True)
"""


def several_config(name: str = "config.yaml", **grpo: Any) -> Path:
    """Write a configuration of two sets to train on and two to validate on, by two environments."""
    for path, first, last in (("low.jsonl", 0, 40), ("held.jsonl", 50, 54)):
        Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in SUMS[first:last]))
    for path, first, last in (("long.jsonl", 100, 130), ("held_long.jsonl", 150, 153)):
        rows = [{"input": f"{row['input']} + 0", "output": row["output"]} for row in SUMS[first:last]]
        Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("doubt.py").write_text(DOUBT)
    sets = {
        "train": [{"data_path": "low.jsonl", "weight": 3}, {"data_path": "long.jsonl", "env_name": "doubt"}],
        "validation": [{"data_path": "held.jsonl"}, {"data_path": "held_long.jsonl", "env_name": "doubt"}],
        "default": {"env_name": "digits"},
        "dataset_name": None,  # nothing of the tiny configuration's
    }
    environments = {"digits": {"class": "digits.Digits"}, "doubt": {"class": "doubt.Doubt"}}
    over = {
        "data": sets,
        "env": environments,
        "grpo": {"max_num_steps": 4, "max_rollout_turns": 2, **grpo},
        # Two responses and what lies between them.
        "policy": {"generation": {"max_new_tokens": 4}},
    }
    return write_config(over, name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = coordinator("up", several_config())
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def test_each_problem_goes_to_the_environment_of_its_set(whole: Path) -> None:
    steps = steps_of(whole / "run")
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for metrics in (step.metrics for step in steps):
        assert metrics["train_long/reward"] == metrics["env_doubt/reward"] == 0.75
        assert metrics["train_low/reward"] == metrics["env_digits/reward"] < 0.5
        assert metrics["reward"] == pytest.approx(0.75 * metrics["train_low/reward"] + 0.25 * 0.75), "3 prompts of 4"
        assert metrics["train_low/accuracy"] <= metrics["accuracy"]
        assert metrics["avg_turns_per_sample"] == 1.25, "one prompt in four is answered"
        assert not any("failures" in name for name in metrics)
    validated = steps[1].metrics
    assert validated["val_held_long/reward"] == validated["val_env_doubt/reward"] == 0.75
    assert validated["val_held/accuracy"] == validated["val_env_digits/accuracy"] == 0.0
    assert validated["val_accuracy"] == pytest.approx(3 / 7)


def test_a_resumed_run_equals_one_that_was_not_interrupted(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for config, *options in ((several_config(max_num_steps=2),), (several_config(), "--resume")):
        done = coordinator("up", config, *options)
        assert done.returncode == 0, done.stderr
    found, expected = steps_of("run"), steps_of(whole / "run")
    assert [deterministic(step.metrics) for step in found] == [deterministic(step.metrics) for step in expected]
