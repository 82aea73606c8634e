"""What `coordinator plan` says that a trainer holds, beside what it holds: counted under fake tensors, shapes alone."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tandem.config import load_config
from tandem.refit.forecast.plan import explain
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]
ROOT = Path(__file__).parents[2]


PLANS = [
    "llama-8b-fsdp8-to-tp2.yaml",
    "llama-70b-tp8pp2-to-tp8.yaml",
    "qwen3-30b-ep8-to-tp4.yaml",
    "deepseek-v3-ep64pp8-to-tp64.yaml",
    "deepseek-v3-pp16ep16-to-tp32dp8.yaml",
]
"""Others differ in their engines."""


@pytest.mark.parametrize("plan", PLANS)
def test_a_trainer_holds_what_was_planned(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path, out = f"examples/plans/{plan}", io.StringIO()
    explain(load_config(path, to_run=False), Console(file=out, width=200))
    found = re.search(r"([\d.]+) GB a trainer, without activations: .* optimizer ([\d.]+)", out.getvalue())
    assert found is not None
    command = [sys.executable, "-m", "tests.simulated_gpu.fake_step", path, "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert ended.returncode == 0, ended.stderr
    counted = json.loads(ended.stdout.splitlines()[-1])
    print(plan, counted)
    assert counted["at_optimizer"] == pytest.approx(float(found[1]), rel=0.1)
    assert counted["peak"] > counted["at_optimizer"], "activations come on top"
    used = counted["at_optimizer"] - counted["kept"]
    assert used > 0.2 * float(found[2]), "gradients that the optimizer has used stay"
