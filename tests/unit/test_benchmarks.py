"""Every benchmark takes part in the smoke test of CI, or says what it needs that is not here."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "benchmarks").glob("test_*.py"))
MAY_BE_SKIPPED = {"test_vllm.py": "vLLM is not installed", "test_vllm_cuda.py": "vLLM is not installed"}
"""Files that are skipped whole where a package is missing, and what they say then."""


def collected(**environment: str) -> tuple[list[str], str]:
    """Return the ids of the benchmarks that would run, and all that pytest prints."""
    words = [sys.executable, "-m", "pytest", "benchmarks", "--collect-only", "-q", "-rs", "-p", "no:randomly"]
    # Not what pytest tells its own processes: benchmarks warn where they are not alone.
    kept = {k: v for k, v in os.environ.items() if k != "TANDEM_BENCHMARK_SMOKE" and not k.startswith("PYTEST_")}
    done = subprocess.run(
        words, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^benchmarks/(\S+\.py::.*)$", done.stdout, re.MULTILINE), done.stdout


@pytest.fixture(scope="module")
def smoked() -> tuple[list[str], str]:
    return collected(TANDEM_BENCHMARK_SMOKE="1")


def test_every_file_takes_part(smoked: tuple[list[str], str]) -> None:
    ids, printed = smoked
    assert len(FILES) >= 26
    there = {each.partition("::")[0] for each in ids}
    for name in FILES:
        if name not in there:
            assert name in MAY_BE_SKIPPED, f"{name} has no benchmark that is smoked"
            assert re.search(rf"{re.escape(name)}:\d+: {re.escape(MAY_BE_SKIPPED[name])}", printed), printed


def test_each_benchmark_runs_once(smoked: tuple[list[str], str]) -> None:
    names = [each.partition("[")[0] for each in smoked[0]]
    assert sorted(names) == sorted(set(names))


def test_ci_runs_the_smoke_test() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    environment = tox["testenv:benchmarks"]
    assert "TANDEM_BENCHMARK_SMOKE = 1" in environment["set_env"]
    assert "pytest benchmarks" in environment["commands"].replace("-m pytest", "pytest")
    assert "checks" in tox["tox"]["env_list"].split(", ")
    assert re.search(r" -e \S*\bbenchmarks\b", tox["testenv:checks"]["commands"])
    assert re.search(r"^\S+/tox\"$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
