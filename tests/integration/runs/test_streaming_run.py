"""Whole runs that train on a step's first groups while its last are generated, also with processes killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import leaks
from tests.harness.runs.asynchronous_runs import ASYNCHRONOUS, check_steps
from tests.harness.runs.harried import coordinator_of
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    HOLDS,
    Command,
    all_gone,
    coordinator,
    merged,
    process_of,
    steps_of,
    wait_until,
    write_config,
)

LATE = f"""{HOLDS}
from tandem.rollout.environments import Score

class Late:
    '''Takes its time for one problem in four.'''

    runs_in = "threads"

    def score(self, problem, response):
        wait_while_held()
        if sum(map(ord, problem.question)) % 4 == 0:
            time.sleep(0.4)
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=share, correct=share > 0.5)
"""
STREAMING: dict[str, Any] = merged(
    ASYNCHRONOUS,
    {
        "grpo": {"streaming_training": True},
        "loss_fn": {"reference_policy_kl_penalty": 0.01},
        "policy": {"train_micro_batch_size": 4, "generation": {"async_engine": True}},
        "env": {"late": {"class": "late.Late", "num_workers": 16, "timeout_s": 600.0}},
    },
)


def write_streaming(over: dict[str, Any] | None = None) -> Path:
    """Write the configuration of a run with streaming training, and its environment."""
    Path("late.py").write_text(LATE)
    return write_config(merged(STREAMING, over or {}))


def has_streamed(run: str = "run") -> bool:
    """Tell whether any step has trained on groups before the others were there."""
    return any(step.metrics["streamed_share"] > 0 for step in steps_of(run))


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_run_trains_on_groups_as_they_come(trainers: int) -> None:
    ran = coordinator("up", write_streaming({"cluster": {"trainers": trainers}, "grpo": {"max_num_steps": 12}}))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_steps("run", age=1, num_steps=12)
    steps = steps_of("run")
    for step in steps:
        metrics = step.metrics
        assert 0 <= metrics["streamed_share"] <= 1
        assert (metrics["streamed_s"] > 0) == (metrics["streamed_share"] > 0)
        assert metrics["num_valid_samples"] == 16
        assert all(seconds >= 0 for seconds in step.seconds.values())
    assert has_streamed()


def test_a_synchronous_run_streams_groups_of_its_newest_weights() -> None:
    ran = coordinator("up", write_streaming({"grpo": {"max_num_steps": 8, "async_grpo": {"enabled": False}}}))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = steps_of("run")
    assert [step.step for step in steps] == [*range(1, 9)]
    for step in steps:  # the weights that generate are those that are trained
        assert step.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert has_streamed()


def test_without_the_key_no_group_is_streamed() -> None:
    over = {"grpo": {"max_num_steps": 2, "streaming_training": False}}
    assert coordinator("up", write_streaming(over)).returncode == 0
    assert not any("streamed_share" in step.metrics for step in steps_of("run"))


@pytest.mark.parametrize("kind", ["trainer", "rollout", "coordinator"])
def test_what_is_killed_while_groups_are_streamed_is_replaced(kind: str) -> None:
    before = leaks.segments()
    over = {"grpo": {"max_num_steps": 16}, "checkpointing": {"save_period": 2}, "logger": {"samples": "all"}}
    hold(75)
    with Command("coordinator", "up", write_streaming(over), "--supervise") as run:
        await_hold(run, "step 2/16")
        children = run.children()
        time.sleep(1.0)  # what is there meanwhile is streamed
        process = coordinator_of(run) if kind == "coordinator" else process_of(run, kind)
        process.kill()
        go_on()
        assert run.wait() == 0, run.output()
        assert all_gone(children, 30.0) == []
    check_steps("run", age=1, num_steps=16)
    assert has_streamed()
    wait_until(lambda: leaks.segments_left(before) == set(), lambda: "no memory to be left")
