"""Asynchronous runs whose trainers keep a copy of their weights for engines, and step while it is read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tandem.refit.digests.comparison import combine
from tandem.refit.digests.task import digest_box
from tandem.refit.layout import whole
from tests.harness.processes import slow_trainer, stale_copy
from tests.harness.processes.slow_trainer import training_file
from tests.harness.runs.by_hand import MEGATRON_TP2, refits_of
from tests.harness.runs.running import (
    Command,
    coordinator,
    joins,
    merged,
    process_of,
    steps_of,
    wait_until,
    write_config,
)

NUM_STEPS = 6
ASYNC: dict[str, Any] = {
    "grpo": {
        "max_num_steps": NUM_STEPS,
        "val_period": 3,
        "async_grpo": {"enabled": True, "max_trajectory_age_steps": 2},
    },
    "policy": {"generation": {"colocated": {"enabled": False}}},
    "cluster": {"rollouts": 2},
}
BY_HAND = {"cluster": {"launch": {"rollouts": 2, "refit": True}}}


def digest_of(checkpoint: Path) -> int:
    """Return the digest of the whole version that lies in a checkpoint."""
    tensors = load_file(checkpoint / "policy" / "model.safetensors")
    shares = [digest_box(name, tuple(each.shape), whole(each.shape), each) for name, each in tensors.items()]
    return combine(*shares)


@contextlib.contextmanager
def run_with_trainer(config: Path, script: str) -> Iterator[Command]:
    """Start a run whose trainer is a script of a test."""
    with Command("coordinator", "up", config) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command(script, *joins(address)):
            yield run


def _engines_of(version: int) -> set[str]:
    """Return the engines that took a version, together or one after the other."""
    return {name for refit in refits_of() if refit.version == version for name in refit.engines}


@pytest.mark.parametrize(
    "trainers", [{}, {"cluster": {"trainers": 2}}, MEGATRON_TP2], ids=["dtensor", "dp2", "megatron"]
)
@pytest.mark.parametrize("keep_copy", ["on", "off"])
def test_what_engines_hold_is_what_was_trained(trainers: dict[str, Any], keep_copy: str) -> None:
    config = write_config(merged(ASYNC, trainers))
    ended = coordinator("up", config, f"refit.keep_copy={keep_copy}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "refit.keep_copy" not in ended.stdout, "nobody has to send"
    assert [step.step for step in steps_of()] == [*range(1, NUM_STEPS + 1)]
    digests: dict[int, set[int]] = {}
    for refit in refits_of():
        assert not refit.quarantined
        digests.setdefault(refit.version, set()).add(refit.digest)
    assert {*digests} >= {0, 3, 6}, "started with, validated, and the last one"
    assert len(digests) == len(set().union(*digests.values())), "one of each version, and each another"
    saved = [*Path("run/checkpoints").glob("step_*")]
    assert len(saved) == 3
    for checkpoint in saved:
        version = int(checkpoint.name.removeprefix("step_"))
        if version in digests:  # else no engine had time for it
            assert digests[version] == {digest_of(checkpoint)}, f"version {version}"


def test_an_engine_that_is_killed_while_a_step_trains_has_a_successor_before_it_ends() -> None:
    training_file(3).touch()
    with run_with_trainer(write_config(merged(ASYNC, BY_HAND)), slow_trainer.__name__) as run:
        run.wait_for("step 2/6")
        wait_until(lambda: _engines_of(2) == {"rollout-0", "rollout-1"}, lambda: f"version 2 in\n{run.output()}")
        before = len(refits_of())
        process_of(run, "rollout").kill()
        run.wait_for(r"rollout-0 is lost: killed by SIGKILL.*; another is launched in its place")
        wait_until(
            lambda: [(r.version, r.engines) for r in refits_of()[before:]] == [(2, ("rollout-0",))],
            lambda: f"a refit of the new one in\n{run.output()}",
        )
        assert "step 3/6" not in run.output(), "which still trains"
        training_file(3).unlink()
        assert run.wait() == 0, run.output()
    assert [step.step for step in steps_of()] == [*range(1, NUM_STEPS + 1)]
    assert _engines_of(NUM_STEPS) == {"rollout-0", "rollout-1"}


def test_a_copy_that_is_not_what_was_trained_ends_the_run() -> None:
    with run_with_trainer(write_config(merged(ASYNC, BY_HAND)), stale_copy.__name__) as run:
        assert run.wait() == 1
        said = re.search(r"error: (rollout-\d) failed while .*: it does not hold version 2: (.*)", run.output())
        assert said is not None, run.output()
        assert said[2].startswith(stale_copy.STALE)
    assert all(refit.version < 2 for refit in refits_of())
    assert all(step.step <= 2 for step in steps_of()), "what was generated with it is not trained on"
