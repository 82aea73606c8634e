"""Read the arguments of torch's optimizers and schedules from source, without importing torch."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tandem.common.errors import nearest
from tandem.config.installed.sources import find_package, parse
from tandem.config.problem import InvalidValue, shown

Base = Literal["Optimizer", "LRScheduler"]

_FILES: dict[Base, str] = {"Optimizer": "optim/*.py", "LRScheduler": "optim/lr_scheduler.py"}
_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum")
_PLATEAU = "ReduceLROnPlateau"


def find_torch_problems(base: Base, path: str, kwargs: Mapping[str, Any], key: str) -> Iterator[InvalidValue]:
    """Yield the problems of a torch class named at ``KEY.name``, and of its ``KEY.kwargs``.

    Classes of other packages are not checked, and none are if torch is not installed.
    """
    root, (module, _, name) = find_package("torch"), path.rpartition(".")
    if root is None or not (module == "" or path.startswith("torch.")):
        return
    folder = root.joinpath(*module.split(".")[1:])
    if module == "" or not (folder.is_dir() or folder.with_suffix(".py").is_file()):
        yield InvalidValue(f"{key}.name", f"there is no module {module!r} to take {path!r} from")
        return
    classes = _find_classes(root, base)
    if name not in classes or not module.startswith("torch.optim"):
        hint = nearest(name, classes) if module.startswith("torch.optim") else ""
        yield InvalidValue(f"{key}.name", f"{path!r} is no {base} class{hint}")
    elif name == _PLATEAU:
        yield InvalidValue(f"{key}.name", f"{_PLATEAU} needs a metric at every step, which schedules do not get")
    else:
        yield from _find_argument_problems(name, _list_arguments(classes, name), kwargs, f"{key}.kwargs")


def _find_argument_problems(
    name: str, arguments: Mapping[str, ast.expr | None], kwargs: Mapping[str, Any], key: str
) -> Iterator[InvalidValue]:
    for keyword in kwargs:
        if keyword not in arguments:
            yield InvalidValue(key, f"{name} takes no {keyword!r}{nearest(keyword, arguments)}")
    for argument, default in arguments.items():
        if argument not in kwargs:
            if default is None:
                yield InvalidValue(key, f"{name} needs {argument!r}")
            continue
        value, like = kwargs[argument], _evaluate_literal(default)
        expected = _describe_expected(like, value)
        if expected is None and argument in _NOT_NEGATIVE and _is_number(value) and value < 0:
            expected = "a number at least 0"
        if expected is None and argument == "betas" and not all(0 <= beta < 1 for beta in value):
            expected = "numbers at least 0 and less than 1"
        if expected is not None:
            yield InvalidValue(f"{key}.{argument}", f"expected {expected}, got {shown(value)}")


def _describe_expected(like: Any, value: Any) -> str | None:
    """Return what an argument with default `like` should be; None if `value` fits."""
    match like:
        case bool():
            return None if isinstance(value, bool) else "true or false"
        case int() | float():
            return None if _is_number(value) else "a number"
        case tuple():
            fits = isinstance(value, list | tuple) and len(value) == len(like) and all(map(_is_number, value))
            return None if fits else f"a list of {len(like)} numbers"
        case _:
            return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _evaluate_literal(default: ast.expr | None) -> Any:
    """Return a literal default, None for any other."""
    try:
        return None if default is None else ast.literal_eval(default)
    except ValueError:
        return None


@functools.cache
def _find_classes(root: Path, base: Base) -> Mapping[str, ast.ClassDef]:
    """Return the classes with a given base, by name."""
    defined = {
        node.name: node
        for path in sorted(root.glob(_FILES[base]))
        for node in parse(path).body
        if isinstance(node, ast.ClassDef)
    }

    def has_base(name: str) -> bool:
        bases = [node.id for node in defined[name].bases if isinstance(node, ast.Name)] if name in defined else []
        return base in bases or any(has_base(parent) for parent in bases)

    return {name: node for name, node in defined.items() if name[0] != "_" and has_base(name)}


def _list_arguments(classes: Mapping[str, ast.ClassDef], name: str) -> dict[str, ast.expr | None]:
    """Return the arguments of a class, except its first (the parameters or the optimizer), with their defaults."""
    constructor = next((n for n in classes[name].body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if constructor is None:
        (base,) = (node.id for node in classes[name].bases if isinstance(node, ast.Name))
        return _list_arguments(classes, base)
    names = constructor.args.args[2:]
    defaults: list[ast.expr | None] = [*constructor.args.defaults]
    padded = [*[None] * (len(names) - len(defaults)), *defaults]
    by_name = dict(zip((argument.arg for argument in names), padded, strict=True))
    return by_name | {a.arg: d for a, d in zip(constructor.args.kwonlyargs, constructor.args.kw_defaults, strict=True)}
