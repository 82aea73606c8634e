"""What must answer at once, or plan for models of any size, imports no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import tandem.coordinator.cli",
        "import tandem.coordinator.loop.run",
        "import tandem.observe.report.report",
        "import tandem.observe.page.__main__, tandem.observe.page.server",
        "import tandem.coordinator.algorithms",
        "import tandem.coordinator.commands.doctor, tandem.launch.doctor.look",
        "import tandem.observe.exporters.telemetry, tandem.launch.service, tandem.samples.tokenizer",
        "import tandem.refit.planner, tandem.refit.program, tandem.refit.service, tandem.refit.digests.task",
        "import tandem.trainer.cli, tandem.rollout.cli",
        "import tandem.rollout.environments.processes.fork_server",
    ],
)
def test_no_torch(code: str) -> None:
    probe = f"{code}\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_help_needs_neither_torch_nor_transformers() -> None:
    probe = (
        "import sys\nfrom tandem.coordinator.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'zmq', 'datasets', 'matplotlib', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("[]\n")
    assert "up" in done.stdout


def test_the_coordinator_forks_before_anything_has_threads() -> None:
    """As numpy has, of the library that it multiplies with."""
    probe = (
        "import os, tandem.coordinator.cli, tandem.launch.launch\n"
        "import tandem.launch.fork_server, tandem.coordinator.loop.spec\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"


def test_check_imports_the_one_task_and_no_torch() -> None:
    """Both stages of the first example, with their data sets and their tokenizer."""
    probe = (
        "import sys\nfrom tandem.coordinator.cli import main\n"
        "try: main(['check', 'examples/arithmetic.yaml'])\nexcept SystemExit: pass\n"
        "unneeded = ('torch', 'datasets', 'pandas', 'pyarrow', 'sympy', 'matplotlib', 'math_verify', 'reasoning_gym',"
        " 'peft', 'tensorboard', 'uvicorn', 'starlette')\n"
        "print([module for module in unneeded if module in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert "OK: grpo on " in done.stdout
    assert done.stdout.endswith("[]\n")
