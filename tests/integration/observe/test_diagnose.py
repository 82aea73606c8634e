"""Runs that are broken on purpose, each in one way: `coordinator diagnose` names it first; of a whole run nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import damaged_rollout, rank_that_becomes_slow, slow_rank, slow_rollout
from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.running import Command, coordinator, joins, merged, process_of, write_config
from tests.harness.trainers.damage import flip_in_tensor

ENVIRONMENTS = """
import random

from tandem.rollout.environments import Score

class Constant:
    def score(self, problem, response):
        return Score(reward=0.5, correct=False)

class Raises:
    def score(self, problem, response):
        if response:
            raise ValueError(f"cannot read {response!r}")
        return Score(reward=1.0, correct=False)

class Brief:
    '''The less is said, the better.'''

    def score(self, problem, response):
        return Score(reward=1.0 - 0.1 * len(response), correct=False)

class Long:
    '''The more is said, the better.'''

    def score(self, problem, response):
        return Score(reward=len(response) / 48, correct=False)

class Unsure:
    '''The less is said, the better; no two of its opinions are quite the same.'''

    def score(self, problem, response):
        return Score(reward=1.0 - 0.1 * len(response) + random.uniform(0.0, 0.05), correct=False)
"""
BASE: dict[str, Any] = {
    "grpo": {"max_num_steps": 5, "val_period": 0},
    "policy": {"generation": {"max_new_tokens": 24}, "optimizer": {"kwargs": {"lr": 1.0e-4}}},
    "checkpointing": {"enabled": False, "metric_name": "reward"},
}
AGE = 4
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate too large": ({"policy": {"optimizer": {"kwargs": {"lr": 10.0}}}}, "policy.optimizer.kwargs.lr"),
    "equal rewards": ({"env": {"mine": {"class": "judging.Constant"}}}, "env.mine"),
    "truncated responses": ({"policy": {"generation": {"max_new_tokens": 1}}}, "policy.generation.max_new_tokens"),
    "failing environment": ({"env": {"mine": {"class": "judging.Raises", "on_error": "zero"}}}, "env.mine"),
    "stale samples": (
        {
            "grpo": {"max_num_steps": 8, "async_grpo": {"enabled": True, "max_trajectory_age_steps": AGE}},
            "policy": {
                "generation": {"colocated": {"enabled": False}},
                "optimizer": {"kwargs": {"lr": 0.009}},
            },
        },
        "loss_fn.use_importance_sampling_correction",
    ),
    "growing responses": (
        {
            "grpo": {"max_num_steps": 16},
            "policy": {
                "max_total_sequence_length": 128,
                "generation": {"max_new_tokens": 96},
                "optimizer": {"kwargs": {"lr": 0.009}},
            },
            "env": {"mine": {"class": "judging.Long"}},
        },
        "env.mine",
    ),
    "low entropy": (
        {
            # Normalised, opinions that hardly differ would count as much as any, and could undo what was learned.
            "grpo": {"max_num_steps": 20, "num_generations_per_prompt": 8, "normalize_rewards": False},
            "policy": {
                "new_model": {"config": {"hidden_size": 128}},
                "train_global_batch_size": 32,
                "optimizer": {"kwargs": {"lr": 0.004}},
            },
            "data": {"num_train": 2},
            "env": {"mine": {"class": "judging.Unsure"}},
        },
        "loss_fn.reference_policy_kl_penalty",
    ),
    "one answer to everything": (
        {
            "grpo": {"max_num_steps": 20},
            "policy": {"optimizer": {"kwargs": {"lr": 0.009}}},
            "data": {"num_train": 4},
            "env": {"mine": {"class": "judging.Brief"}},
        },
        "env.mine",
    ),
}
"""What is broken, which finding says so, and a key that it names."""


def diagnosed(run: str | Path) -> dict[str, Any]:
    """Return what is said of a run."""
    ended = coordinator("diagnose", "--json", run)
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads(ended.stdout)
    return dict(found)


def names_of(found: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in found["findings"]]


def write(over: dict[str, Any]) -> Path:
    config = write_config(merged(BASE, over))
    Path("judging.py").write_text(ENVIRONMENTS)
    return config


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with which nothing is wrong, and its configuration."""
    folder = tmp_path_factory.mktemp("healthy")
    with in_folder(folder):
        config = write({"checkpointing": {"enabled": True, "save_period": 5}, "cluster": {"trainers": 2}})
        ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    return folder


def test_of_a_healthy_run_nothing_is_found_and_it_is_said_what_was_looked_for(healthy: Path) -> None:
    found = diagnosed(healthy / "run")
    assert found["findings"] == []
    assert found["not_looked_at"] == []
    said = coordinator("diagnose", healthy / "run").stdout
    assert "GRPO, 5 of 5 steps, finished; reward " in said
    assert "\nnothing found\n" in said
    assert "looked for: damaged weights, " in said


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_the_first_that_is_said(name: str) -> None:
    over, key = BROKEN[name]
    ended = coordinator("up", write(over))
    assert ended.returncode == 0, ended.stderr
    found = diagnosed("run")
    first = found["findings"][0]
    assert first["name"] == name, found
    assert key in first["look_at"]
    assert first["evidence"]
    assert first["certainty"] in ("certain", "likely")
    assert not first["explained_by"]
    if name == "learning rate too large":
        others = {finding["name"]: finding["explained_by"] for finding in found["findings"][1:]}
        assert others["low entropy"] == name
    if name == "one answer to everything":
        assert "repeated problems" in names_of(found)


def test_an_environment_that_ends_the_run_is_what_it_failed_of() -> None:
    ended = coordinator("up", write({"env": {"mine": {"class": "judging.Raises"}}}))
    assert ended.returncode == 1
    found = diagnosed("run")
    assert names_of(found) == ["failing environment", "run failed"]
    assert found["findings"][1]["explained_by"] == "failing environment"
    assert "ValueError: cannot read" in found["findings"][0]["evidence"][0]
    assert "0 of 5 steps, failed" in found["course"]


def test_a_damaged_checkpoint_is_named(healthy: Path) -> None:
    shutil.copytree(healthy, "copy")
    with in_folder(Path("copy")):
        flip_in_tensor(Path("run/checkpoints/step_5/policy/model.safetensors"), "up_proj")
        ended = coordinator("up", "config.yaml", "--resume", "grpo.max_num_steps=6")
        assert ended.returncode == 1
        found = diagnosed("run")
    assert names_of(found) == ["damaged checkpoint", "run failed"]
    assert "model.safetensors" in found["findings"][0]["evidence"][0]


def run_by_hand(
    script: str, *arguments: str, over: dict[str, Any], trainers: int = 1, rollouts: int = 1, kind: str = "rollouts"
) -> int:
    """Run a configuration whose last process of a kind is started by hand; return the exit code."""
    sizes = {"trainers": trainers, "rollouts": rollouts}
    launch = {"launch": {"refit": True, **sizes, kind: sizes[kind] - 1}}
    with Command("coordinator", "up", write(merged({"cluster": {**sizes, **launch}}, over))) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command(script, *arguments, *joins(address)):
            return run.wait()


def test_damaged_weights_are_named() -> None:
    over = {"refit": {"alias": "never"}}
    assert run_by_hand(damaged_rollout.__name__, "1:flip,2:flip,3:flip", over=over) == 0
    found = diagnosed("run")
    assert names_of(found) == ["damaged weights"]
    assert found["findings"][0]["certainty"] == "likely", "three times is no accident"
    assert "version 1: rollout-0 was quarantined" in found["findings"][0]["evidence"][0]


def test_damage_that_nothing_verifies_shows_as_a_disagreement() -> None:
    over = {"refit": {"alias": "never", "verify": "off"}}
    assert run_by_hand(damaged_rollout.__name__, "*:treble", over=over) == 0
    found = {finding["name"]: finding for finding in diagnosed("run")["findings"]}["engine and trainer disagree"]
    assert found["certainty"] == "likely"
    assert "refit.verify" in found["look_at"]
    assert "refit.verify is off" in " ".join(found["evidence"])


def test_a_slow_engine_is_named() -> None:
    assert run_by_hand(slow_rollout.__name__, rollouts=2, over={"grpo": {"max_num_steps": 4}}) == 0
    found = diagnosed("run")
    assert names_of(found) == ["slow engine"]
    assert found["findings"][0]["what"].startswith("rollout-1 takes ")


def test_a_slow_trainer_rank_is_named() -> None:
    over = {"grpo": {"max_num_steps": 6}}
    assert run_by_hand(slow_rank.__name__, trainers=2, kind="trainers", over=over) == 0
    found = diagnosed("run")
    assert names_of(found) == ["slow trainer rank"]
    assert found["findings"][0]["what"].startswith("trainer-1 takes ")
    assert "the machine of trainer-1" in found["findings"][0]["look_at"]


@pytest.fixture
def killed() -> Path:
    """Return the folder of a run one of whose engines was killed, and then all of it."""
    config = write({"grpo": {"max_num_steps": 1000}, "cluster": {"rollouts": 2}})
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 1/1000")
        process_of(run, "rollout").kill()
        run.wait_for("is lost: ")
        run.wait_for(r"is lost: [\s\S]*step \d+/1000")
        assert "killed" not in names_of(diagnosed("run")), "it is going on"
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait()
    return Path("run")


def test_a_run_that_was_killed_and_what_it_lost_before_are_told(killed: Path) -> None:
    found = diagnosed(killed)
    assert names_of(found) == ["killed", "lost processes"]
    assert "no end is recorded" in found["course"]
    assert "rollout-0" in found["findings"][1]["evidence"][0]


def test_a_rank_that_becomes_slow_midway_is_named_with_its_step() -> None:
    """And stays so."""
    over = {"grpo": {"max_num_steps": 14}}
    script = rank_that_becomes_slow.__name__
    assert run_by_hand(script, trainers=2, kind="trainers", over=over) == 0
    (found,) = (each for each in diagnosed("run")["findings"] if each["name"] == "became slow")
    (line,) = (line for line in found["evidence"] if line.startswith("trainer-1: "))
    assert re.search(r"before step [678], ", line), line
    assert found["what"].startswith("trainer-1 became slow in step ")
    assert "the machine of trainer-1" in found["look_at"]
