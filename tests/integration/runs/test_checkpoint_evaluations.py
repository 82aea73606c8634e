"""Evaluation during training: each checkpoint has the scores that the run's own validation would have given it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.coordinator.observers.checkpoint_evaluations import read_evaluation
from tandem.observe.listing import run_folders
from tandem.observe.run_folder.found_models import models_in
from tandem.observe.run_folder.journal import LATE_METRICS, read_journal
from tandem.observe.run_folder.journal_file import LOCK_NAME
from tests.harness.runs.by_hand import in_folder, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    Command,
    all_gone,
    coordinator,
    deterministic,
    merged,
    steps_of,
    wait_until,
    write_config,
)

pytestmark = pytest.mark.timeout(600)
STEPS, PERIOD, KEPT = 6, 2, 1
GONE_S = 60.0
SETTINGS: dict[str, Any] = {
    "grpo": {"max_num_steps": STEPS, "num_val_generations_per_prompt": 2, "val_temperature": 0.7, "val_seed": 3},
    "policy": {"optimizer": {"kwargs": {"lr": 0.05}}},
    "checkpointing": {"save_period": PERIOD, "keep_top_k": KEPT, "metric_name": "val:reward", "higher_is_better": True},
}


def settings(**grpo: Any) -> dict[str, Any]:
    return {**SETTINGS, "grpo": {**SETTINGS["grpo"], **grpo}}


DURING = {**settings(val_period=0, val_at_start=False), "eval": {"during_training": True}}


@pytest.fixture(scope="module")
def validated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that validates itself in the steps that save a checkpoint."""
    folder = tmp_path_factory.mktemp("validated")
    undisturbed_run(folder, settings(val_period=PERIOD))
    return folder / "run"


@pytest.fixture(scope="module")
def validated(validated_run: Path) -> dict[int, dict[str, float]]:
    """Return its metrics, by step."""
    return {step.step: step.metrics for step in steps_of(validated_run)}


def val(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("val_")}


def of_training(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in deterministic(metrics).items() if not name.startswith("val_")}


def assert_evaluated(expected: dict[int, dict[str, float]]) -> None:
    """Check the finished run in this folder against the one that validated itself."""
    steps = {step.step: step.metrics for step in steps_of("run")}
    saved = range(PERIOD, STEPS + 1, PERIOD)
    assert {step: val(steps[step]) for step in saved} == {step: val(expected[step]) for step in saved}
    assert all(val(expected[step]) for step in saved)
    assert {n: of_training(m) for n, m in steps.items() if n} == {n: of_training(m) for n, m in expected.items() if n}
    best = max(saved, key=lambda step: (expected[step]["val_reward"], step))
    kept = [int(path.name.partition("_")[2]) for path in Path("run/checkpoints").glob("step_*")]
    assert sorted(kept) == sorted({best, STEPS})
    (model,) = models_in(Path("run"), "best")
    assert model.folder.parent.name == f"step_{best}"
    with read_journal(Path("run")) as journal:
        lines = [text for _, member, text in journal.events() if member == LATE_METRICS]
    assert len(lines) == len(saved)


def test_checkpoints_have_the_scores_of_a_run_that_validates_itself(
    validated: dict[int, dict[str, float]], tmp_path: Path
) -> None:
    with in_folder(tmp_path):
        done = coordinator("up", write_config(DURING))
        assert done.returncode == 0, done.stderr
        assert_evaluated(validated)
        for step in range(PERIOD, STEPS + 1, PERIOD):
            reward = validated[step]["val_reward"]
            assert f"step {step}: the checkpoint has held-out accuracy" in done.stdout
            assert f"held-out reward {reward:.3f}" in done.stdout
        assert "has no val_reward" not in done.stdout
        assert run_folders([Path()]) == [Path("run")], "runs that evaluate are none of the user's"
        replayed = coordinator("replay", "run")
        assert replayed.returncode == 0, replayed.stderr
        assert f"weights are equal to the bit to those of step {STEPS} of run\n" in replayed.stdout + "\n"
        assert not Path("run-replay/evaluation").exists(), "it needs engines"


def find_follower(run: Command) -> psutil.Process | None:
    """Return the process that evaluates, if there is one."""
    for process in run.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tandem.coordinator.evaluation.follower" in process.cmdline():
                return process
    return None


def await_follower(run: Command, former: psutil.Process | None = None) -> psutil.Process:
    """Return the process that evaluates, and is not the former one."""
    wait_until(lambda: find_follower(run) not in (None, former), lambda: run.output())
    follower = find_follower(run)
    assert follower is not None
    return follower


def test_a_killed_evaluation_and_a_killed_coordinator_lose_nothing(
    validated: dict[int, dict[str, float]], tmp_path: Path
) -> None:
    hold(33, tmp_path)  # a step's, or an evaluation's
    with in_folder(tmp_path), Command("coordinator", "up", write_config(DURING), "--supervise") as run:
        first = await_follower(run)
        first.kill()
        second = await_follower(run, first)
        second.suspend()
        run.wait_for("the evaluation of checkpoints was killed by SIGKILL; it is started again")
        wait_until(lambda: second.status() != psutil.STATUS_STOPPED, run.output)
        await_hold(run, f"step {PERIOD}/{STEPS}")
        everything = run.children()
        lock = Path("run", LOCK_NAME).read_text()
        psutil.Process(int(re.findall(r"process (\d+)", lock)[0])).kill()
        go_on()
        await_follower(run, second)
        assert run.wait() == 0, run.output()
        assert_evaluated(validated)
        assert all_gone(everything, GONE_S) == []


def test_a_checkpoint_that_cannot_be_evaluated_is_said_and_tried_again(
    validated: dict[int, dict[str, float]], tmp_path: Path
) -> None:
    place, kept = Path(f"run/evaluation/step_{PERIOD}"), {"checkpointing": {"keep_top_k": None}}
    with in_folder(tmp_path):
        config = write_config(merged(DURING, kept))
        hold()
        with Command("coordinator", "up", config) as run:
            wait_until(place.parent.is_dir, run.output)
            place.write_text("in the way")
            go_on()
            assert run.wait() == 0, run.output()
            assert f"step {PERIOD}: the checkpoint could not be evaluated: " in run.output()
        failed = read_evaluation(Path("run"), PERIOD)
        assert failed is not None
        assert f"step_{PERIOD}" in failed.error
        steps = {step.step: val(step.metrics) for step in steps_of("run")}
        assert (steps[PERIOD], steps[STEPS]) == ({}, val(validated[STEPS]))
        place.unlink()
        again = coordinator("up", config, "--resume")
        assert again.returncode == 0, again.stderr
        assert "1 checkpoint is still to be evaluated" in again.stdout
        steps = {step.step: val(step.metrics) for step in steps_of("run")}
        assert steps[PERIOD] == val(validated[PERIOD])


def test_adapters_are_merged_first(validated_run: Path, tmp_path: Path) -> None:
    base = {"model_name": str(validated_run / f"checkpoints/step_{STEPS}/policy"), "new_model": None}
    adapters = {"policy": {**base, "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}}}}
    scores = []
    for name, over in (("itself", settings(val_period=PERIOD)), ("follower", DURING)):
        (tmp_path / name).mkdir()
        with in_folder(tmp_path / name):
            done = coordinator("up", write_config(merged(over, adapters)))
            assert done.returncode == 0, done.stderr
            scores.append({step.step: val(step.metrics) for step in steps_of("run") if not step.step % PERIOD})
    assert scores[0] == scores[1]
    assert all(scores[0].values())
    assert not [*tmp_path.rglob("merged")], "a copy of the weights for each checkpoint"


def test_what_cannot_be_evaluated_during_training_is_refused(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "checkpointing.enabled is false": {"checkpointing": {"enabled": False}},
        "there are no held-out problems": {"data": {"num_validation": 0}},
        "cluster.launch leaves processes to be started by hand": {"cluster": {"launch": "none"}},
        "draws the same sample 2 times": {"eval": {"temperature": 0.0}},
    }
    with in_folder(tmp_path):
        for reason, change in changes.items():
            done = coordinator("check", write_config(merged(DURING, change)))
            assert done.returncode != 0
            assert reason in done.stderr
