"""The fields of transformers' model configurations, read from its source: importing the classes would import torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def model_fields(model_type: str) -> frozenset[str]:
    """Return every field that a configuration of this type takes, deprecated names too; none for an unknown type.

    It errs on the side of more: whatever a method of the class or of one of its bases sets or looks up by name counts.
    """
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES, SPECIAL_MODEL_TYPE_TO_MODULE_NAME

    name = CONFIG_MAPPING_NAMES.get(model_type)
    package = importlib.util.find_spec("transformers")
    if name is None or package is None or not package.submodule_search_locations:
        return frozenset()
    module = SPECIAL_MODEL_TYPE_TO_MODULE_NAME.get(model_type, model_type).replace("-", "_")
    root = Path(package.submodule_search_locations[0])
    return frozenset(_fields(root / "models" / module / f"configuration_{module}.py", name, root))


def _fields(path: Path, name: str, root: Path) -> Iterator[str]:
    """Yield what the class `name`, which `path` defines or imports, and its bases take."""
    tree = _parsed(path)
    defined = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if defined is not None:
        yield from _own_fields(defined)
        for base in defined.bases:
            if isinstance(base, ast.Name):
                yield from _fields(path, base.id, root)
        return
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level and name in (alias.name for alias in node.names):
            folder = path.parents[node.level - 1]
            source = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            if source.is_file() and source.is_relative_to(root):
                yield from _fields(source, name, root)


def _own_fields(defined: ast.ClassDef) -> Iterator[str]:
    for node in defined.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if "ClassVar" not in ast.unparse(annotation):
                    yield name
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict() as names):
                yield from (str(name.value) for name in [*names.keys, *names.values] if isinstance(name, ast.Constant))
            case ast.FunctionDef(name=name):
                if any("setter" in ast.unparse(decorator) for decorator in node.decorator_list):
                    yield name
                if name in ("__init__", "__post_init__"):
                    yield from (argument.arg for argument in [*node.args.args, *node.args.kwonlyargs])
                yield from _taken(node)


def _taken(function: ast.FunctionDef) -> Iterator[str]:
    """Yield what a method sets, and what it looks up in a mapping by name, such as its keyword arguments."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr="pop" | "get"), args=[ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


@functools.cache
def _parsed(path: Path) -> ast.Module:
    """Return a module's syntax; an empty one if its source is not there."""
    return ast.parse(path.read_bytes() if path.is_file() else b"")
