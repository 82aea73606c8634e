"""Levels that follow accuracy, in whole runs: killed and resumed, synchronous and asynchronous."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tandem.coordinator.algorithms.curriculum import CurriculumLevels
from tandem.samples.data_sets.reasoning_tasks import CurriculumSettings
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.asynchronous_runs import ASYNCHRONOUS
from tests.harness.runs.running import Command, coordinator, deterministic, merged, steps_of, weights_of, write_config

CURRICULUM = {"last_k": 2, "success_threshold": 0.4, "failure_threshold": 0.1, "max_level": 2}
MIXTURE = [{"name": "chain_sum", "level": 0}, {"name": "products", "level": 1}]
JUDGE = """
from tandem.rollout.environments import Score

class Judge:
    '''Sums are right where a response has a digit; products never are.'''

    def score(self, problem, response):
        correct = problem.metadata["source_dataset"] == "chain_sum" and any(map(str.isdigit, response))
        return Score(float(correct) - len(response) / 100, correct=correct)
"""
RUN: dict[str, Any] = {
    "grpo": {"max_num_steps": 8, "val_period": 0},
    "policy": {"max_total_sequence_length": 48, "new_model": {"characters": "0123456789+-*= "}},
    "data": {
        "dataset_name": "reasoning_gym",
        "task": "composite",
        "task_params": {"datasets": MIXTURE, "curriculum": CURRICULUM},
        "num_train": 64,
        "num_validation": 16,
        "prompt_template": "{metadata[expression]}",
    },
    "env": {"mine": {"class": "judging.Judge"}},
    "checkpointing": {"save_period": 2},
    "logger": {"samples": "all"},
}


def assert_levels_follow_the_journal(folder: str, age: int) -> list[tuple[float, float]]:
    """Check that levels, and the problems drawn, are those that the journal's accuracies give; return the levels."""
    levels = CurriculumLevels(CurriculumSettings(**CURRICULUM), {part["name"]: part["level"] for part in MIXTURE}, age)
    of_steps = []
    for record in steps_of(folder):
        expected = levels.finish(record.step, record.metrics)
        assert {name: record.metrics[name] for name in expected} == expected
        by_task = {part["name"]: int(expected[f"train_{part['name']}/level"]) for part in MIXTURE}
        for row in read_step(Path(folder) / "samples", record.step):
            task, _, level = row.problem_id.partition("-level")
            if level:
                assert int(level.partition("-")[0]) == by_task[task] != {"chain_sum": 0, "products": 1}[task]
        of_steps.append((expected["train_chain_sum/level"], expected["train_products/level"]))
    return of_steps


def test_levels_follow_accuracy_and_a_killed_run_ends_with_the_same_bits() -> None:
    Path("judging.py").write_text(JUDGE)
    config = write_config(RUN)
    whole = coordinator("up", config, "logger.log_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    levels = assert_levels_follow_the_journal("whole", 0)
    assert levels[0] == (0, 1)
    assert levels[-1] == (2, 0), "sums became harder, and products easier"
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 5/8")
        run.signal(signal.SIGKILL)
        run.wait()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert assert_levels_follow_the_journal("run", 0) == levels
    assert weights_of("run/checkpoints/step_8") == weights_of("whole/checkpoints/step_8")
    for one, other in zip(steps_of("run"), steps_of("whole"), strict=True):
        assert deterministic(one.metrics) == deterministic(other.metrics)


def test_levels_of_an_asynchronous_run_are_those_of_its_journal_also_after_a_kill() -> None:
    Path("judging.py").write_text(JUDGE)
    config = write_config(merged(merged(RUN, ASYNCHRONOUS), {"grpo": {"val_period": 0}}))
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 5/8")
        run.signal(signal.SIGKILL)
        run.wait()
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    levels = assert_levels_follow_the_journal("run", 1)
    assert levels[-1][0] > levels[0][0]
