"""Whole runs on simulated GPUs, with an engine that does with memory what vLLM does (`hook/stand_in_engine.py`).

Trainers and engines take turns on one GPU, or have two GPUs each, all held in a file in which processes count their
memory: what is left of it when a run is over is seen.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.by_hand import assert_same_results, in_folder, refits_of
from tests.integration.harness import (
    Command,
    all_gone,
    merged,
    processes_of,
    steps_of,
    typed,
    wait_until,
    write_config,
)
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]

NUM_STEPS = 10
COLOCATED: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
    "policy": {
        "new_model": {"config": {"num_key_value_heads": 2}},
        "generation": {"backend": "vllm", "vllm_cfg": {"precision": "float32", "max_model_len": 32}},
        "optimizer": {"kwargs": {"lr": 5.0e-3}},
    },
    "refit": {"verify": "full"},
    "checkpointing": {"save_period": 2},
    "cluster": {"gpus_per_node": 1, "deadlines": {"refit_s": 20.0}},
}
DISJOINT: dict[str, Any] = merged(
    COLOCATED,
    {
        "policy": {"generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 2}}}},
        "cluster": {"gpus_per_node": 4, "trainers": 2, "rollouts": 2, "max_replacements": 20},
    },
)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Have four GPUs, and the stand-in for vLLM; return what says how many bytes processes that live hold."""
    state = tmp_path / "held"
    monkeypatch.setenv("SIMULATED_GPU_COUNT", "4")
    monkeypatch.setenv("SIMULATED_GPU_STAND_IN", "1")
    monkeypatch.setenv("SIMULATED_GPU_STATE", str(state))

    def look() -> int:
        entries = struct.iter_unpack("iiQQ", state.read_bytes())
        return sum(num_bytes for pid, _, _, num_bytes in entries if psutil.pid_exists(pid))

    return look


def assert_learned(run: str | Path) -> None:
    rewards = [step.metrics["reward"] for step in steps_of(run) if step.step]
    assert len(rewards) == NUM_STEPS
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.05, rewards
    refits = refits_of(run)
    assert {refit.version for refit in refits} == {*range(NUM_STEPS + 1)}
    assert all(refit.digest for refit in refits), "what engines held was not attested"


def undisturbed(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    with in_folder(folder):
        ended = typed("coordinator", "up", str(write_config(config)), timeout_s=300.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "run"


def victims_of(run: Command, kind: str) -> list[psutil.Process]:
    """Return the processes of a kind, the oldest first; the coordinator is that which is supervised."""
    if kind != "coordinator":
        return processes_of(run, kind)
    return [each for each in run.children() if "tandem.coordinator.cli up" in " ".join(each.cmdline())]


def test_training_and_an_engine_that_unmaps_its_weights_take_turns(tmp_path: Path, held: Callable[[], int]) -> None:
    run = undisturbed(tmp_path / "colocated", COLOCATED)
    assert_learned(run)
    assert held() == 0


def test_two_trainers_and_two_engines_survive_the_loss_of_each(tmp_path: Path, held: Callable[[], int]) -> None:
    expected = undisturbed(tmp_path / "alone", DISJOINT)
    assert_learned(expected)
    assert held() == 0
    victims = [("rollout", 0), ("trainer", 1), ("refit", 0), ("coordinator", 0)]
    (tmp_path / "harried").mkdir()
    with in_folder(tmp_path / "harried"):
        with Command("coordinator", "up", write_config(DISJOINT), "--supervise") as run:
            for after, (kind, index) in enumerate(victims, start=1):
                run.wait_for(rf"(?m)^step +{after}/{NUM_STEPS}  ")
                wait_until(lambda at=(kind, index): len(victims_of(run, at[0])) > at[1], run.output)
                victims_of(run, kind)[index].kill()
            children = run.children()
            assert run.wait() == 0, run.output()
            assert not all_gone(children, 20.0)
        assert_same_results("run", expected)
        assert held() == 0
