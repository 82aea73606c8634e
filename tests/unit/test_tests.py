"""Tests share what they need through harness modules, and those that begin first are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests", "benchmarks")
FIRST = re.compile(r"_LONG_FILES = \((.*?)\n\)", re.DOTALL)


def imported_by(path: Path) -> Iterator[str]:
    """Return the dotted names of all modules that a module imports, or might: a name out of a package can be one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def test_no_module_imports_from_a_test_module() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    tests = {path.stem for path in paths if path.stem.startswith("test_")}
    assert Path(__file__).stem in tests
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imported_by(path)
        if name.rpartition(".")[2] in tests
    ]
    assert not found, found


def test_every_file_that_begins_first_is_there() -> None:
    listed = FIRST.search((ROOT / "tests" / "conftest.py").read_text())
    assert listed is not None
    names = re.findall(r'"(\S+)"', listed[1])
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert names
    assert {*names} <= there
    assert len(names) == len({*names})
