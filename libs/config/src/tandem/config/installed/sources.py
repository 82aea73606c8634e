"""Read classes of installed packages from source, without importing them."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def find_package(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it; None if it is not installed."""
    try:
        package = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the enclosing package is not installed either
        return None
    locations = package.submodule_search_locations if package is not None else None
    return Path(next(iter(locations))) if locations else None


def find_class_and_bases(path: Path, name: str, root: Path) -> Iterator[ast.ClassDef]:
    """Yield the class `name`, defined by the module at `path` or imported from within `root`, then its bases.

    Nothing is yielded for a class that does not exist.
    """
    tree = parse(path)
    defined = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if defined is not None:
        yield defined
        for base in defined.bases:
            if isinstance(base, ast.Name):
                yield from find_class_and_bases(path, base.id, root)
        return
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level and name in (alias.name for alias in node.names):
            folder = path.parents[node.level - 1]
            source = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            if source.is_file() and source.is_relative_to(root):
                yield from find_class_and_bases(source, name, root)


def find_annotated_fields(defined: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the annotations of a class's own public fields."""
    return {
        node.target.id: node.annotation
        for node in defined.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_"
        if "ClassVar" not in ast.unparse(node.annotation)
    }


def find_default(defined: ast.ClassDef, field: str) -> object:
    """Return the default of a class's own field if it is written as a literal, else the expression."""
    for node in defined.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field:
            try:
                return ast.literal_eval(node.value) if node.value is not None else node
            except ValueError:
                return node.value
    return None


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return a module's syntax tree; an empty one if its source is missing."""
    return ast.parse(path.read_bytes() if path.is_file() else b"")
