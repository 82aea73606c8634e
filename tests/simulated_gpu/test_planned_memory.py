"""What `coordinator plan` says that a trainer holds, beside what it holds: counted under fake tensors, shapes alone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tandem.config import load_config
from tandem.coordinator.forecast.memory import memory_of
from tandem.coordinator.forecast.plan import explain
from tandem.coordinator.forecast.sides import model_shape, sides
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]
ROOT = Path(__file__).parents[2]
_GB = 1e9

PLANS = [
    "llama-8b-fsdp8-to-tp2.yaml",
    "llama-8b-lora.yaml",
    "llama-70b-tp8pp2-to-tp8.yaml",
    "qwen3-30b-ep8-to-tp4.yaml",
    "qwen3-30b-fsdp16ep8-to-tp4.yaml",
    "deepseek-v3-ep64pp8-to-tp64.yaml",
    "deepseek-v3-pp16ep16-to-tp32dp8.yaml",
]
"""Others differ in their engines."""
_FEWER = (
    {} if "TANDEM_WHOLE_PLANS" in os.environ else {"qwen3-30b": ["policy.hf_config_overrides.num_hidden_layers=12"]}
)
"""Layers of models of which each rank has all, a quarter of theirs: to count 48 takes five minutes."""
MICRO_BATCHES = 2
"""In a step of a rank: gradients of the first are there while the second is computed."""


@pytest.mark.parametrize("plan", PLANS)
def test_a_trainer_holds_what_was_planned(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path, out = f"examples/plans/{plan}", io.StringIO()
    num = MICRO_BATCHES * load_config(path, to_run=False).data_parallel_size
    batch = f"grpo.num_prompts_per_step=1 grpo.num_generations_per_prompt={num} policy.train_global_batch_size={num}"
    overrides = [*batch.split(), *_FEWER.get(plan[:9], [])]
    config = load_config(path, overrides, to_run=False)
    shape = model_shape(config)
    assert not isinstance(shape, str)
    planned = memory_of(config, sides(config, shape)[0])
    explain(config, Console(file=out, width=200))
    assert f"{planned.peak.num_bytes / _GB:,.1f} GB at its peak, in {planned.peak.name}" in out.getvalue()

    command = [sys.executable, "-m", "tests.simulated_gpu.fake_step", path, str(planned.rank), *overrides]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr
    counted = json.loads(ended.stdout.splitlines()[-1])
    at_optimizer = sum(planned.resident.values()) / _GB
    phases = {phase.name: phase.num_bytes / _GB for phase in planned.phases}
    print(plan, planned.rank, counted, at_optimizer, phases)
    assert counted["at_optimizer"] == pytest.approx(at_optimizer, rel=0.1)
    assert counted["peaks"] == pytest.approx(phases, rel=0.1)
    used = counted["at_optimizer"] - counted["kept"]
    assert used > 0.2 * planned.resident["optimizer"] / _GB, "gradients that the optimizer has used stay"
