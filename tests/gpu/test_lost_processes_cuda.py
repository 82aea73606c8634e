"""A run whose trainer is on a GPU loses each kind of process, and goes on as a run left alone does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runs.by_hand import assert_same_results, in_folder, refits_of
from tests.harness.runs.harried import service_of
from tests.harness.runs.running import Command, all_gone, steps_of, typed, write_config
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

NUM_STEPS = 8
TOLERANCE = 1e-4
"""Of float32 sums that are taken in another order."""
CONFIG: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
    "policy": {"new_model": {"config": {"num_key_value_heads": 2}}},
    "refit": {"verify": "full"},
    "checkpointing": {"save_period": 2},
    "cluster": {"max_replacements": 20},
}
MEGATRON = {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}
VICTIMS = ("rollout", "trainer", "refit", "coordinator")
"""Whom to kill, one after each step."""


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_a_run_survives_the_loss_of_each_process(backend: str, tmp_path: Path) -> None:
    config = CONFIG
    if backend == "megatron":
        pytest.importorskip("megatron.core")
        config = {**CONFIG, "policy": {**CONFIG["policy"], **MEGATRON}}
    for name in ("alone", "harried"):
        (tmp_path / name).mkdir()
    with in_folder(tmp_path / "alone"):
        ended = typed("coordinator", "up", str(write_config(config)), timeout_s=300.0)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    with in_folder(tmp_path / "harried"):
        with Command("coordinator", "up", write_config(config), "--supervise") as run:
            for after, kind in enumerate(VICTIMS, start=1):
                run.wait_for(rf"(?m)^step +{after}/{NUM_STEPS}  ")
                service_of(run, kind).kill()
            children = run.children()
            assert run.wait() == 0, run.output()
            assert not all_gone(children, 20.0)
        assert all(refit.digest for refit in refits_of()), "what engines held was not verified"
        if IS_RUNNING:
            assert_same_results("run", tmp_path / "alone" / "run")
    # A GPU's own kernels may add the gradient up in another order each time.
    for found, alone in zip(steps_of(tmp_path / "harried" / "run"), steps_of(tmp_path / "alone" / "run"), strict=True):
        for metric in ("loss", "grad_norm", "reward", "token_mult_prob_error"):
            if alone.step:
                assert found.metrics[metric] == pytest.approx(alone.metrics[metric], rel=TOLERANCE, abs=TOLERANCE)
