"""Have torch and Triton compute on the simulated GPU, in every process: see `tests/simulated_gpu/run.py`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _Followed(importlib.abc.Loader):
    """Loads a module, and then does something with it."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[Any], object]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> object:  # resources, the source: as the module's own loader has it
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, then: dict[str, Callable[[Any], object]]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._then:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self._then[name])
        return spec


def _round_to_bfloat16(interpreter: Any) -> None:
    """Have Triton's interpreter round float32 to bfloat16 as GPUs do; it cuts the lower bits off."""
    import torch

    convert = interpreter._convert_float

    def rounded(values: Any, from_: Any, to: Any, rounding: Any) -> Any:
        if (str(from_), str(to), rounding) != ("fp32", "bf16", None):
            return convert(values, from_, to, rounding)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = rounded


if library := os.environ.get("SIMULATED_GPU_OPERATORS"):
    followers = {
        "torch": lambda torch: torch.ops.load_library(library),
        "triton.runtime.interpreter": _round_to_bfloat16,
    }
    sys.meta_path.insert(0, _Finder(followers))
