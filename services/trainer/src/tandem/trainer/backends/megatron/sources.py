"""Sources of a model's first weights: safetensors files, read a box at a time, or tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.common.errors import ModelError
from tandem.refit.adapters import catalogue
from tandem.refit.layout import Box

_WEIGHTS = {"F64", "F32", "BF16", "F16"}
"""Dtypes of weights that are not quantised."""


class SafetensorsFolder:
    """The tensors of a checkpoint's safetensors files, which are read only as requested.

    Raises `ModelError` if there are none or they cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        for file in catalogue.files_of(folder):
            try:
                opened: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self._file_of

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape, on the CPU. Raises `ModelError`."""
        if name not in self._file_of:
            raise ModelError(f"the checkpoint in {self._folder} lacks {name}")
        tensor_slice = self._file_of[name].get_slice(name)
        if tensor_slice.get_dtype() not in _WEIGHTS:
            raise ModelError(
                f"{name} in {self._folder} is quantised ({tensor_slice.get_dtype()}); Megatron-Core trains a "
                "checkpoint in bfloat16, float16 or float32"
            )
        require_shape(name, shape, tensor_slice.get_shape())
        tensor: torch.Tensor = tensor_slice[box.region]
        return tensor


class TensorsInMemory:
    """Whole tensors by the names of a checkpoint."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self._tensors

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape. Raises `ModelError`."""
        if name not in self._tensors:
            raise ModelError(f"the model lacks {name}")
        require_shape(name, shape, self._tensors[name].shape)
        return self._tensors[name].detach()[box.region]


class AdapterTensorSource:
    """The whole tensors of adapters, in memory, and those of their base model."""

    def __init__(self, adapters: Mapping[str, torch.Tensor], base: Any) -> None:
        """Join adapters with their `base`, which has the same method `read`."""
        self._adapters, self._own = adapters, TensorsInMemory(adapters)
        self._base = base

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape. Raises `ModelError`."""
        tensor: torch.Tensor = (self._own if name in self._adapters else self._base).read(name, shape, box)
        return tensor


def require_shape(name: str, expected: Sequence[int], actual: Sequence[int]) -> None:
    """Raise `ModelError` unless a checkpoint's tensor has the expected shape."""
    if tuple(expected) != tuple(actual):
        raise ModelError(f"{name} should have shape {tuple(expected)}, the checkpoint has {tuple(actual)}")
