"""The command for the first hour on a machine with a GPU, on one that is simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
    pytest.mark.timeout(900),
]

SCRIPT = Path(__file__).parents[2] / "scripts" / "first_gpu_hour.sh"


def hour(folder: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, folder, *parts],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def summary(folder: Path) -> dict[str, int]:
    lines = (folder / "summary.tsv").read_text().splitlines()
    return {name: int(status) for name, status, _ in (line.split("\t") for line in lines)}


def test_parts_are_run_once_and_leave_what_they_found(tmp_path: Path) -> None:
    first = hour(tmp_path, "doctor", "waiting")
    assert first.returncode == 0, first.stdout + first.stderr
    assert summary(tmp_path) == {"doctor": 0, "waiting": 0}
    assert json.loads((tmp_path / "doctor.json").read_text())
    assert "passed" in (tmp_path / "waiting.log").read_text()
    again = hour(tmp_path, "doctor", "waiting")
    assert again.stdout.splitlines() == ["doctor: done before", "waiting: done before"]


def test_a_part_that_takes_too_long_is_ended_and_counts_as_failed(tmp_path: Path) -> None:
    ended = hour(tmp_path, "digests", PART_S="1")
    assert ended.returncode == 1
    assert summary(tmp_path) == {"digests": 124}


def test_what_is_no_part_is_named_before_anything_runs(tmp_path: Path) -> None:
    ended = hour(tmp_path, "doctor", "refits")
    assert ended.returncode == 2
    assert ended.stderr.startswith("refits is no part; the parts are: doctor transports ")
    assert summary(tmp_path) == {}
