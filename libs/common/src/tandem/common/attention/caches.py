"""Caches of Transformers' models, whatever their classes: the tensors in them, by their places."""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import torch
import transformers

CACHE_NAMES = ("cache", "cache_params", "state")
"""Parameters of forward passes that take a cache, and fields of their outputs."""
CachePath: TypeAlias = tuple[object, ...]
"""The place of a tensor in a cache: names of attributes, keys and indices."""


def find_tensors(cache: Any) -> dict[CachePath, torch.Tensor]:
    """Return the tensors of a cache by their places, each once."""
    tensors: dict[CachePath, torch.Tensor] = {}
    visited: set[int] = set()

    def collect(value: Any, path: CachePath) -> None:
        if id(value) in visited:
            return
        visited.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors[path] = value
        elif isinstance(value, list | tuple):
            for index, part in enumerate(value):
                collect(part, (*path, index))
        elif isinstance(value, dict) or has_parts(value):
            for name, part in (value if isinstance(value, dict) else vars(value)).items():
                collect(part, (*path, name))

    collect(cache, ())
    return tensors


def has_parts(value: Any) -> bool:
    """Return whether a value within a cache may hold tensors in its attributes."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | torch.nn.Module | transformers.PretrainedConfig)
        and not inspect.isroutine(value)
    )
