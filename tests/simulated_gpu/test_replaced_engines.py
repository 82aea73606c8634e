"""An engine that is lost in the middle of a run, and measures the memory of a GPU that a trainer also uses."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.running import (
    BIN,
    Command,
    joins,
    merged,
    process_of,
    steps_of,
    titled,
    wait_until,
    write_config,
)
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]
COORDINATOR = BIN / "coordinator"
"""In a process of its own, which reads the environment as it starts."""
NUM_STEPS = 6
MEASURES_S = 4.0
ONE_GPU: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
    "policy": {
        # Large enough that what a trainer gives back is whole blocks of its allocator.
        "new_model": {"config": {"hidden_size": 256, "intermediate_size": 1024}},
        "generation": {"backend": "vllm", "vllm_cfg": {"precision": "float32", "max_model_len": 32}},
    },
    "loss_fn": {"class": "slow.Slow"},
    "checkpointing": {"enabled": False},
    "cluster": {"gpus_per_node": 1},
}
HOLD, HELD = Path("loss_is_held"), Path("loss_waits")
"""Not `hold`, which holds the rewards of the harness."""
SLOW = f"""
import time
from pathlib import Path

from tandem.trainer.losses import aggregate

class Slow:
    def __init__(self, settings, counts, device):
        self.counts = counts

    def __call__(self, batch, scores):
        while Path("{HOLD}").exists():
            Path("{HELD}").touch()
            time.sleep(0.02)
        return aggregate(-batch.advantages_BT * scores.logprobs, batch.loss_mask_BT, self.counts, token_level=True)
"""


def test_an_engine_is_built_again_while_no_trainer_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATED_GPU_STAND_IN", "1")
    monkeypatch.setenv("SIMULATED_GPU_STATE", str(tmp_path / "held"))
    monkeypatch.setenv("SIMULATED_GPU_MEASURES", str(MEASURES_S))
    with in_folder(tmp_path):
        Path("slow.py").write_text(SLOW)
        log = Path("run/logs/rollout-0.log")
        with Command(COORDINATOR, "up", write_config(ONE_GPU)) as run:
            run.wait_for(rf"step +1/{NUM_STEPS}")
            HOLD.touch()
            wait_until(HELD.exists, run.output)
            process_of(run, "rollout").kill()
            run.wait_for(r"rollout-0 is lost: killed by SIGKILL.*; another is launched in its place")
            wait_until(lambda: log.read_text().count("rollout-0 joined") == 2, run.output)
            time.sleep(0.75 * MEASURES_S)  # in which it would begin to measure, if it were built at once
            HOLD.unlink()
            assert run.wait() == 0, run.output()
        assert [step.step for step in steps_of("run")] == [*range(1, NUM_STEPS + 1)]
        assert len(re.findall("is lost", run.output())) == 1, run.output()


def test_a_trainer_that_was_started_by_hand_has_an_engine_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that forks services is replaced, too: what the coordinator has done since must not reach a device."""
    monkeypatch.setenv("SIMULATED_GPU_STAND_IN", "1")
    config = merged(ONE_GPU, {"cluster": {"launch": {"trainers": 0, "rollouts": 1, "refit": True}}})
    with in_folder(tmp_path):
        Path("slow.py").write_text(SLOW)
        with Command(COORDINATOR, "up", write_config(config)) as run:
            address = run.wait_for(r"tcp://\S+:\d+")[0]
            with Command(BIN / "trainer", *joins(address)) as trainer:
                run.wait_for(rf"step +1/{NUM_STEPS}")
                HOLD.touch()
                wait_until(HELD.exists, run.output)
                for process in (*titled(run.children(), "coordinator: forks services"), process_of(run, "rollout")):
                    process.kill()
                run.wait_for(r"rollout-0 is lost: killed by SIGKILL.*; another is launched in its place")
                HOLD.unlink()
                assert run.wait() == 0, run.output() + trainer.output()
        assert [step.step for step in steps_of("run")] == [*range(1, NUM_STEPS + 1)]
