"""The plain path: what a steady step of GRPO executes, counted, and the places that docs/architecture.md names on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.integration.harness import BIN, TIMEOUT_S, steps_of, write_config

ROOT = Path(__file__).resolve().parents[2]
WALK = ROOT / "tests" / "walk"
MOST_FUNCTIONS, MOST_FILES, MOST_LINES = 1000, 150, 27_000
"""What a steady step may execute: what it does today, and a tenth."""


class Walk(msgspec.Struct, frozen=True):
    """What the processes of a run have executed: files within the package, and functions of them."""

    steady: frozenset[tuple[str, str]]
    """Between the commits of steps 3 and 5."""
    whole: frozenset[tuple[str, str]]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    folder = tmp_path_factory.mktemp("walk")
    out = folder / "calls"
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = write_config({"grpo": {"max_num_steps": 6, "val_period": 0}, "checkpointing": {"save_period": 6}})
        path = os.pathsep.join([str(WALK), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "WALK_OUT": str(out), "PYTHONPATH": path}
        command = [BIN / "coordinator", "up", config]
        ran = subprocess.run(command, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        ends = {step.step: step.committed_at for step in steps_of(folder / "run")}
    steady, whole = set(), set()
    for file in out.glob("*.json"):
        for second, calls in json.loads(file.read_text())["calls"].items():
            whole.update(map(tuple, calls))
            if ends[3] <= int(second) < ends[5]:
                steady.update(map(tuple, calls))
    return Walk(frozenset(steady), frozenset(whole))


def test_a_steady_step_executes_no_more_than_it_did(walk: Walk) -> None:
    files = {file for file, _ in walk.steady}
    sizes = {str(path).rsplit("/src/tandem/", 1)[1]: path for path in ROOT.glob("*/*/src/tandem/**/*.py")}
    num_lines = sum(len(sizes[file].read_text().splitlines()) for file in files)
    print(f"a steady step executes {len(walk.steady)} functions in {len(files)} files of {num_lines} lines")
    assert len(walk.steady) <= MOST_FUNCTIONS
    assert len(files) <= MOST_FILES
    assert num_lines <= MOST_LINES


def places(section: str) -> Iterator[str]:
    """Yield the files within the package that a section of the page names."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (text,) = re.findall(rf"^## {section}\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    targets = dict(re.findall(r"^(\[`[^\]]+`\]): \.\./(\S+)$", page, re.MULTILINE))
    for name in re.findall(r"\[`[^\]]+`\](?!\()", text):
        yield targets[name]
