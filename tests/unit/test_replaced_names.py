"""What a test replaces in a module of ours is there, in the tests of vLLM and GPUs too, which run seldom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*ROOT.glob("libs/*/src"), *ROOT.glob("services/*/src")]


def find_module(name: str) -> Path | None:
    """Return the file of a module of ours, None if it is none."""
    path = name.replace(".", "/")
    files = (source / file for source in SOURCES for file in (f"{path}.py", f"{path}/__init__.py"))
    return next((file for file in files if file.is_file()), None)


def names_in(module: Path) -> set[str]:
    """Return the names that a module binds, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def replaced_in(test: Path) -> Iterator[tuple[str, str]]:
    """Yield modules of ours and names that a test sets in them by `monkeypatch.setattr`."""
    tree = ast.parse(test.read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tandem"):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"):
            continue
        match node.args:
            case [ast.Name(id=local), ast.Constant(value=str(name)), *_] if local in modules:
                yield modules[local], name
            case [ast.Constant(value=str(path)), _] if path.startswith("tandem."):
                module, _, name = path.rpartition(".")
                yield module, name


def test_what_tests_replace_is_there() -> None:
    replaced = [
        (test, module, name)
        for test in sorted(ROOT.glob("tests/**/*.py"))
        for module, name in replaced_in(test)
        if find_module(module) is not None
    ]
    assert len(replaced) > 50
    names = {module: names_in(path) for _, module, _ in replaced if (path := find_module(module)) is not None}
    absent = [
        f"{test.relative_to(ROOT)}: {module}.{name}" for test, module, name in replaced if name not in names[module]
    ]
    assert absent == []
