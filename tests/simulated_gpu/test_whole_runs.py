"""Whole runs on simulated GPUs, with an engine that does with memory what vLLM does (`hook/stand_in_engine.py`).

Trainers and engines take turns on one GPU, whose memory engines open, or have two GPUs each, none of which reaches
another's memory, so that weights stream over NCCL. Processes count in a file what they hold of a GPU, and note in
another what crosses between them: what is left when a run is over is seen, and by which way the weights went.
"""

from __future__ import annotations

import statistics
import struct
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.harness.runs.by_hand import assert_same_results, in_folder, refits_of
from tests.harness.runs.harried import service_of
from tests.harness.runs.running import Command, all_gone, merged, steps_of, typed, write_config
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
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
    "cluster": {"gpus_per_node": 1, "max_replacements": 20, "deadlines": {"refit_s": 20.0}},
}
DISJOINT: dict[str, Any] = merged(
    COLOCATED,
    {
        "policy": {"generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 2}}}},
        "cluster": {"gpus_per_node": 4, "trainers": 2, "rollouts": 2},
    },
)


PHASES = ("training_trainer", "generation_trainer", "generation_engine", "training_engine")


class Placement(NamedTuple):
    """Where trainers and engines are, and how weights come from the ones to the others."""

    config: dict[str, Any]
    way: str
    has_peers: bool
    victims: tuple[tuple[str, int], ...]
    """Whom to kill, one after each step: the kind of process, and which of them."""


PLACEMENTS = {
    "colocated": Placement(COLOCATED, "ipc", True, (("rollout", 0), ("trainer", 0), ("refit", 0), ("coordinator", 0))),
    "disjoint": Placement(DISJOINT, "nccl", False, (("rollout", 0), ("trainer", 1), ("refit", 0), ("coordinator", 0))),
}


class Gpus:
    """Four GPUs, and what processes wrote down about them."""

    def __init__(self, folder: Path) -> None:
        self.state, self._carried = folder / "held", folder / "carried"
        self.variables = {
            "SIMULATED_GPU_COUNT": "4",
            "SIMULATED_GPU_STAND_IN": "1",
            "SIMULATED_GPU_STATE": str(self.state),
            "SIMULATED_GPU_CARRIED": str(self._carried),
        }

    def num_bytes_held(self) -> int:
        """Return the bytes that processes hold that live."""
        entries = struct.iter_unpack("iiQQ", self.state.read_bytes())
        return sum(num_bytes for pid, _, _, num_bytes in entries if psutil.pid_exists(pid))

    def carried(self) -> dict[str, int]:
        """Return the bytes that crossed between processes since this was last asked, by the way that they went."""
        found: dict[str, int] = {}
        for line in self._carried.read_text().splitlines():
            way, num_bytes = line.split()
            found[way] = found.get(way, 0) + int(num_bytes)
        self._carried.unlink()
        return found


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Have four GPUs, and the stand-in for vLLM."""
    made = Gpus(tmp_path)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


def assert_learned(run: str | Path) -> None:
    rewards = [step.metrics["reward"] for step in steps_of(run) if step.step]
    assert len(rewards) == NUM_STEPS
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.05, rewards
    refits = refits_of(run)
    assert {refit.version for refit in refits} == {*range(NUM_STEPS + 1)}
    assert all(refit.digest for refit in refits), "what engines held was not verified"


def undisturbed(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    with in_folder(folder):
        ended = typed("coordinator", "up", str(write_config(config)), timeout_s=300.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "run"


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_run_survives_the_loss_of_each_process(
    placement: Placement, tmp_path: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMULATED_GPU_PEERS", str(int(placement.has_peers)))
    config, victims = placement.config, placement.victims
    expected = undisturbed(tmp_path / "alone", config)
    assert_learned(expected)
    assert gpus.num_bytes_held() == 0
    carried = gpus.carried()
    assert carried.keys() == {placement.way}
    if placement.way == "nccl":
        assert carried["nccl"] == sum(sum(refit.num_bytes.values()) for refit in refits_of(expected))
    (tmp_path / "harried").mkdir()
    with in_folder(tmp_path / "harried"):
        with Command("coordinator", "up", write_config(config), "--supervise") as run:
            for after, (kind, index) in enumerate(victims, start=1):
                run.wait_for(rf"(?m)^step +{after}/{NUM_STEPS}  ")
                service_of(run, kind, index).kill()
            children = run.children()
            assert run.wait() == 0, run.output()
            assert not all_gone(children, 20.0)
        assert_same_results("run", expected)
        assert gpus.num_bytes_held() == 0
        assert gpus.carried().keys() == {placement.way}
    if placement.config is COLOCATED:
        monkeypatch.setenv("SIMULATED_GPU_LATE", "1")
        assert_same_from_host_memory(tmp_path / "offloaded", config, expected)


def assert_same_from_host_memory(folder: Path, config: dict[str, Any], expected: Path) -> None:
    """Keep the policy in host memory, out of which the engine takes it to its GPU; what is queued comes late."""
    run = undisturbed(folder, merged(config, {"policy": {"dtensor_cfg": {"cpu_offload": True}}}))
    assert_same_results(run, expected, same_batches=True)
    assert all(sum(refit.num_bytes.values()) for refit in refits_of(run)), "it is not read in place"
    for step, other in zip(steps_of(run), steps_of(expected), strict=True):
        own, plain = ({name: each.metrics[f"memory_{name}_gb"] for name in PHASES} for each in (step, other))
        assert own["generation_trainer"] < 0.1 * plain["generation_trainer"]
        assert own["training_trainer"] < plain["training_trainer"]
        assert own["generation_engine"] > 0.9 * plain["generation_engine"]
        assert plain["generation_trainer"] < plain["training_trainer"], "the optimizer's state waits in host memory"
        assert plain["training_engine"] < 0.2 * plain["generation_engine"], "an engine that sleeps holds no cache"


def test_trainers_step_while_engines_generate(gpus: Gpus, tmp_path: Path) -> None:
    """Weights reach engines between two tokens, on other devices than trainers'."""
    asynchronous = {"enabled": True, "max_trajectory_age_steps": 1, "in_flight_weight_updates": True}
    over = {"grpo": {"max_num_steps": 4, "async_grpo": asynchronous}, "checkpointing": {"enabled": False}}
    run = undisturbed(tmp_path / "asynchronous", merged(DISJOINT, over))
    steps = [step for step in steps_of(run) if step.step]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert max(step.metrics["max_trajectory_age"] for step in steps) == 1.0
    assert {refit.version for refit in refits_of(run)} >= {1, 2, 3}
    assert all(refit.digest for refit in refits_of(run)), "what engines held was not verified"
