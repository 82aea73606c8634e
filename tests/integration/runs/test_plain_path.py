"""The plain path: what a steady step of GRPO executes, and the places on it that docs/architecture.md names."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.harness.runs.running import BIN, TIMEOUT_S, steps_of, write_config

ROOT = Path(__file__).resolve().parents[3]
WALK = ROOT / "tests" / "walk"
PART_S = 0.05
"""As `tests/walk/sitecustomize.py` has it."""
MOST_FUNCTIONS, MOST_FILES, MOST_LINES = 600, 80, 6_650
"""What each steady step may execute: a little more than the 592 to 596 functions of 1 December 2026, in 80 files.

Their 6,630 lines are those of the functions, not of their files, since a file that joins its only reader brings lines
that no step executes. Some functions are in all of the steps only where the machine is quiet.

Of the functions 40 are comprehensions and generator expressions, which Python counts as functions of their own: 3.12
runs most of them within theirs.
"""
BY_THE_CLOCK = frozenset({"coordinator/observers/live_file.py"})
"""Files of what is done every second, and not by a step: only where steps are long is it in each of them."""
OF_HEARTBEATS = frozenset(
    {
        ("common/process_lifetime.py", "_read_status"),
        ("common/process_lifetime.py", "is_waiting_for_disk"),
        ("common/texts.py", "shorten"),
        ("common/texts.py", "visible"),
        ("coordinator/processes/registry.py", "ProcessRegistry.broadcast"),
    }
)
"""Functions that heartbeats call, likewise."""
ALTERNATIVES = {
    "coordinator/scheduler/rules/losing.py": "processes that were lost, and samples before they were fetched",
    "trainer/backends/megatron/held.py": "the other training backend",
    "trainer/backends/megatron/pipeline.py": "the other training backend",
    "trainer/backends/megatron/weights.py": "the other training backend",
    "trainer/scorers/columns.py": "columns of models beside the policy",
    "rollout/engines/vllm/engine.py": "the other engine",
    "rollout/engines/vllm/part.py": "the other engine",
    "refit/transports/copying.py": "copies, where the trainer's memory is not read in place",
    "refit/transports/exchange.py": "streams, where memory cannot be shared",
}
"""Places of which the page says that another run goes there, and when."""


class Walk(msgspec.Struct, frozen=True):
    """What the processes of a run have executed: files within the package, and functions of them."""

    steady: frozenset[tuple[str, str]]
    """In each of steps 5 to 9, of ten: what is done now and then by the clock is not in all of them."""
    whole: frozenset[tuple[str, str]]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    folder = tmp_path_factory.mktemp("walk")
    out = folder / "calls"
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = write_config({"grpo": {"max_num_steps": 10, "val_period": 0}, "checkpointing": {"save_period": 10}})
        path = os.pathsep.join([str(WALK), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "WALK_OUT": str(out), "PYTHONPATH": path}
        command = [BIN / "coordinator", "up", config]
        ran = subprocess.run(command, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        ends = {step.step: step.committed_at for step in steps_of(folder / "run")}
    whole: set[tuple[str, str]] = set()
    of_steps: dict[int, set[tuple[str, str]]] = {step: set() for step in range(5, 10)}
    for file in out.glob("*.json"):
        for part, calls in json.loads(file.read_text())["calls"].items():
            whole.update(map(tuple, calls))
            for step, executed in of_steps.items():
                if ends[step - 1] - PART_S <= int(part) * PART_S <= ends[step]:
                    executed.update(map(tuple, calls))
    of_all = set.intersection(*of_steps.values()) - OF_HEARTBEATS
    steady = {(file, name) for file, name in of_all if file not in BY_THE_CLOCK}
    return Walk(frozenset(steady), frozenset(whole))


def lines_of(path: Path, names: set[str]) -> set[int]:
    """Return the lines of a file's functions with these qualified names; comprehensions are within theirs."""
    lines: set[int] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                inner = f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>."
                if name in names:
                    lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
            visit(child, inner)

    visit(ast.parse(path.read_text()), "")
    return lines


def test_a_steady_step_executes_no_more_than_it_did(walk: Walk) -> None:
    files = {file for file, _ in walk.steady}
    paths = {str(path).rsplit("/src/tandem/", 1)[1]: path for path in ROOT.glob("*/*/src/tandem/**/*.py")}
    num_lines = sum(len(lines_of(paths[file], {name for at, name in walk.steady if at == file})) for file in files)
    inner = sum(name.endswith(("comp>", "genexpr>")) for _, name in walk.steady)
    print(
        f"a steady step executes {len(walk.steady)} functions, {inner} of them comprehensions, of {num_lines} lines "
        f"in {len(files)} files"
    )
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


@pytest.mark.parametrize("section", ["One rollout group, through the code", "One weight, through the code"])
def test_a_run_goes_by_every_place_that_the_page_names(walk: Walk, section: str) -> None:
    executed = {file for file, _ in walk.whole}
    missed = []
    for place in places(section):
        within = place.split("/src/tandem/")[1]
        if within not in ALTERNATIVES and not any(file == within or file.startswith(f"{within}/") for file in executed):
            missed.append(place)
    assert missed == []
