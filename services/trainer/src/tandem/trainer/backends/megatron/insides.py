"""Megatron-Core's functions by their names, each checked before it is relied on.

A function that differs from the supported release is an error with its name, never a wrong number.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from tandem.common.errors import ModelError


def module(name: str) -> Any:
    """Return a module of Megatron-Core."""
    return importlib.import_module(f"megatron.core.{name}")


def function(place: str, name: str) -> Any:
    """Return a function, or a method of a class, of a module. Raises `ModelError`."""
    attribute = module(place)
    for part in name.split("."):
        if not hasattr(attribute, part):
            raise changed(f"{place}.{name}", "it is gone")
        attribute = inspect.getattr_static(attribute, part)
    return attribute


def require_arguments(place: str, name: str, arguments: tuple[str, ...]) -> None:
    """Check which arguments a function takes. Raises `ModelError`."""
    current = tuple(inspect.signature(function(place, name)).parameters)
    if current != arguments:
        raise changed(f"{place}.{name}", f"it takes {', '.join(current)} and took {', '.join(arguments)}")


def require_call(place: str, name: str, called: str) -> None:
    """Check that a function looks a name up in its module. Raises `ModelError`."""
    caller = function(place, name)
    plain = getattr(caller, "__func__", caller)  # for a static method
    if called not in inspect.unwrap(plain).__code__.co_names:
        raise changed(f"{place}.{name}", f"it does not look {called} up any more")


def changed(name: str, difference: str) -> ModelError:
    """Return the error for a function that is not as it was."""
    return ModelError(f"Megatron-Core has changed, and cannot train on a CPU: megatron.core.{name}: {difference}")
