"""Asynchronous runs whose trainer and rollouts note what they do, and are held where a test wants."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import held_processes
from tests.harness.runs import consoles
from tests.harness.runs.by_hand import refits_of
from tests.harness.runs.running import TINY, Command, joins, merged, steps_of

TALKS = """
import time
from tandem.rollout.environments import Score, Turn

class Talks:
    '''Answers twice, after a while; every digit of the policy's is worth a tenth.'''

    def step(self, problem, conversation):
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        time.sleep(0.05)
        reward = 0.1 * sum(character.isdigit() for character in said[-1])
        if len(said) == 3:
            return Score(reward, correct=reward > 0.2)
        return Turn([{"role": "user", "content": f"{len(said)}+1"}], reward)
"""
ASYNCHRONOUS: dict[str, Any] = {
    "grpo": {
        "max_num_steps": 8,
        "val_period": 3,
        "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
    },
    "loss_fn": {"use_importance_sampling_correction": True},
    "policy": {
        "generation": {"colocated": {"enabled": False}},
        "optimizer": {"kwargs": {"lr": 1.0e-2}},
    },
    "cluster": {"rollouts": 2},
}
TALKING: dict[str, Any] = {
    "grpo": {"max_rollout_turns": 3},
    "policy": {"max_total_sequence_length": 64, "generation": {"max_new_tokens": 8}},
    "env": {"talks": {"class": "talking.Talks", "num_workers": 3}},
    "cluster": {"launch": {"refit": True}},
}
"""Requests take long enough to meet new weights; trainer and rollouts are started by the test."""


def as_ppo(config: dict[str, Any], num_epochs: int = 1) -> dict[str, Any]:
    """Return the same asynchronous run for PPO, whose value model learns faster than the policy."""
    section = merged(TINY["grpo"], config["grpo"])
    asynchronous = section.pop("async_grpo")
    return {
        **{name: value for name, value in config.items() if name != "grpo"},
        "algorithm": "ppo",
        "ppo": section | {"async_ppo": asynchronous, "ppo_epochs": num_epochs},
        "value": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 2.0e-2}}},
    }


@contextlib.contextmanager
def held_run(*arguments: str | Path) -> Iterator[Command]:
    """Start a run whose trainer and two rollouts are of `held_processes`."""
    Path("talking.py").write_text(TALKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path.cwd()))
        with _started(*arguments) as run:
            yield run


@contextlib.contextmanager
def _started(*arguments: str | Path) -> Iterator[Command]:
    with Command("coordinator", "up", *arguments) as run, contextlib.ExitStack() as started:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        for kind in ("trainer", "rollout", "rollout"):
            out = started.enter_context(Path(f"{kind}-{time.monotonic_ns()}.txt").open("wb"))
            words = (kind, *joins(address))
            process = consoles.fork_server().start(held_processes.__name__, words, out)
            started.callback(process.wait, 20.0)
            started.callback(process.kill)
        yield run
        for file in Path().glob("hold_*"):
            file.unlink()


def check_steps(run: str | Path, age: int, num_steps: int = 8, val_period: int = 3) -> None:
    """Assert that every step is there once, of samples that are young enough, and every version verified."""
    steps = steps_of(run)
    assert [step.step for step in steps] == list(range(1, num_steps + 1))
    for step in steps:
        metrics = step.metrics
        assert 0 <= metrics["avg_trajectory_age"] <= metrics["max_trajectory_age"] <= min(age, step.step - 1)
        assert sum(metrics[f"token_share/age_{k}"] for k in range(age + 1)) == pytest.approx(1.0)
        assert metrics["groups_too_old"] == 0
        assert ("val_accuracy" in metrics) == (step.step % val_period == 0 or step.step == num_steps)
    assert max(step.metrics["max_trajectory_age"] for step in steps) > 0
    refits = refits_of(run)
    assert {refit.version for refit in refits} == set(range(num_steps + 1))
    for version in range(num_steps + 1):
        (digest,) = {refit.digest for refit in refits if refit.version == version}
        assert digest, "verified"
