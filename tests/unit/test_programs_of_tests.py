"""Programs that stand in tests as text name what there is: a renaming by tools does not reach them."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.harness.scripts import ROOT


def programs(path: Path) -> Iterator[tuple[int, ast.Module]]:
    """Yield the texts of a file that are programs which import something of Tandem's, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
        else:
            continue
        if "import" in text and "tandem" in text:
            try:
                yield node.lineno, ast.parse(textwrap.dedent(text))
            except SyntaxError:  # prose, or a part of a program
                continue


def missing(program: ast.Module) -> Iterator[str]:
    """Yield what a program names of Tandem's modules, and what is not there."""
    modules: dict[str, str] = {}
    for node in ast.walk(program):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "tandem":
            continue
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if file_of(name) is not None:
                modules[alias.asname or alias.name] = name
            elif alias.name != "*" and not binds(str(node.module), alias.name):
                yield name
    for node in ast.walk(program):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            module = modules.get(node.value.id)
            if module is not None and not binds(module, node.attr):
                yield f"{module}.{node.attr}"


def file_of(module: str) -> Path | None:
    """Return the file of a module of Tandem's; None if there is none."""
    path = module.replace(".", "/")
    files = (*ROOT.glob(f"*/*/src/{path}.py"), *ROOT.glob(f"*/*/src/{path}/__init__.py"))
    return files[0] if files else None


@functools.cache
def binds(module: str, name: str) -> bool:
    """Return whether a module has a name of its own, or makes its names when they are asked for."""
    path = file_of(module)
    if path is None:
        return False
    text = path.read_text()
    pattern = (
        rf"^(async def |def |class |)(?P<name>{name})\b|^(from .* )?import .*\b{name}\b|^    {name},$|def __getattr__"
    )
    return re.search(pattern, text, re.MULTILINE) is not None or file_of(f"{module}.{name}") is not None


def test_programs_within_tests_name_what_there_is() -> None:
    num_programs, found = 0, []
    for path in sorted((*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py"))):
        for line, program in programs(path) if path != Path(__file__) else ():
            num_programs += 1
            found += [f"{path.relative_to(ROOT)}:{line}: {name}" for name in missing(program)]
    assert num_programs > 50
    assert found == []


def test_a_name_that_is_not_there_is_found() -> None:
    assert [*missing(ast.parse("from tandem.common import keys; from tandem.common.errors import NoError"))] == [
        "tandem.common.errors.NoError"
    ]
    assert [*missing(ast.parse("from tandem.common import descriptors; descriptors.LEAST; descriptors.MOST"))] == [
        "tandem.common.descriptors.MOST"
    ]
