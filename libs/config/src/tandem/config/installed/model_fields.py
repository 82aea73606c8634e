"""Read Transformers' model types and their fields from source, without importing torch."""

from __future__ import annotations

import ast
import functools
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.config.installed.sources import find_annotated_fields, find_class_and_bases, find_package


@functools.cache
def list_model_fields(model_type: str) -> frozenset[str]:
    """Return every field of this type's configuration class, deprecated names included; none for an unknown type.

    The result may be too large: it includes each name that a method of the class or its bases sets or looks up.
    """
    return frozenset(field for defined in _find_classes(model_type) for field in _list_declared_fields(defined))


def _find_classes(model_type: str) -> Iterator[ast.ClassDef]:
    """Yield the class of a model type, then its bases; nothing for an unknown type."""
    name = list_model_types().get(model_type)
    root = find_package("transformers")
    if name is None or root is None:
        return
    special: Mapping[str, str] = _read_mappings(root)["SPECIAL_MODEL_TYPE_TO_MODULE_NAME"]
    module = special.get(model_type, model_type).replace("-", "_")
    path = root / "models" / module / f"configuration_{module}.py"
    yield from find_class_and_bases(path, name, root)


def find_default(model_type: str, field: str) -> Any:
    """Return the default of a field of this type; None if it is not a literal."""
    for defined in _find_classes(model_type):
        for node in defined.body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)) if name == field:
                    return value
    return None


_CUTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
"""Dimension that tensor parallelism cuts of the weight of each projection in a layer like Llama's."""


@functools.cache
def is_cut_like_llama(model_type: str) -> bool:
    """Tell whether Transformers' own tensor-parallel plan for a type cuts the projections of Llama's layers, as there.

    Transformers says so in the configuration's class (``base_model_tp_plan``); a type with anything else in its plan,
    or without one, is cut in another way.
    """
    for defined in _find_classes(model_type):
        for node in defined.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="base_model_tp_plan")], value=ast.Dict() as plan):
                    return _cuts_projections(ast.literal_eval(plan))
    return False


def _cuts_projections(plan: Mapping[str, str]) -> bool:
    styles = {0: "colwise", 1: "rowwise"}
    named = {path.rpartition(".")[2] for path in plan if path.startswith(("layers.*.self_attn.", "layers.*.mlp."))}
    are_known = all(style == styles.get(_CUTS.get(path.rpartition(".")[2], -1)) for path, style in plan.items())
    return are_known and len(named) == len(plan) and {"q_proj", "k_proj", "v_proj", "o_proj"} <= named


def list_model_types() -> Mapping[str, str]:
    """Return the configuration class of every model type; none if Transformers is not installed."""
    root = find_package("transformers")
    class_names: Mapping[str, str] = {} if root is None else _read_mappings(root)["CONFIG_MAPPING_NAMES"]
    return class_names


@functools.cache
def _read_mappings(root: Path) -> Mapping[str, Any]:
    """Run the module of model types alone: its package would search the files of all models."""
    return runpy.run_path(str(root / "models/auto/auto_mappings.py"))


def _list_declared_fields(defined: ast.ClassDef) -> Iterator[str]:
    yield from find_annotated_fields(defined)
    for node in defined.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict() as names):
                yield from (str(name.value) for name in [*names.keys, *names.values] if isinstance(name, ast.Constant))
            case ast.FunctionDef(name=name):
                if any("setter" in ast.unparse(decorator) for decorator in node.decorator_list):
                    yield name
                if name in ("__init__", "__post_init__"):
                    yield from (argument.arg for argument in [*node.args.args, *node.args.kwonlyargs])
                yield from _list_set_fields(node)


def _list_set_fields(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names that a method sets, or looks up in a mapping, such as its keyword arguments."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr="pop" | "get"), args=[ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
