"""Have torch and Triton compute on the simulated GPU, in every process: see `tests/simulated_gpu/run.py`."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import vllm_without_kernels


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


def _interpret(interpreter: Any) -> None:
    """Have Triton's interpreter work on the GPU's memory where it lies, and compute with bfloat16 as GPUs do.

    It would copy whole storages to the CPU and back, cut the lower bits of float32 off, and multiply the bits of
    bfloat16 as if they were integers.
    """
    import torch

    interpreter.GridExecutor._init_args_hst = lambda _, arguments, named: (arguments, named)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    _queue(interpreter.GridExecutor)
    convert = interpreter._convert_float

    def rounded(values: Any, from_: Any, to: Any, rounding: Any) -> Any:
        if (str(from_), str(to), rounding) != ("fp32", "bf16", None):
            return convert(values, from_, to, rounding)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = rounded
    builder = interpreter.InterpreterBuilder
    multiply, combine = builder.create_dot, builder.binary_op

    def is_bfloat16(handle: Any) -> bool:
        return bool(handle.dtype.scalar == interpreter.tl.bfloat16)

    def widened(handle: Any) -> Any:
        if not is_bfloat16(handle):
            return handle
        bits = handle.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), interpreter.tl.float32)

    def dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return multiply(self, widened(left), widened(right), *rest)

    def binary(self: Any, left: Any, right: Any, op: Any) -> Any:
        found = combine(self, widened(left), widened(right), op)
        if not is_bfloat16(left) or found.data.dtype == bool:
            return found
        bits = rounded(found.data, interpreter.tl.float32, interpreter.tl.bfloat16, None)
        return interpreter.TensorHandle(bits, interpreter.tl.bfloat16)

    builder.create_dot, builder.binary_op = dot, binary


class _Pointer:
    """A tensor's address and type, which do not keep its memory."""

    def __init__(self, tensor: Any) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return int(self._address)


def _queue(executor: Any) -> None:
    """Have a kernel run at its turn in the stream that it is launched on, which may be in another thread."""
    import torch

    runtime = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
    run, kept, number, one_at_a_time = executor.__call__, dict[int, Any](), itertools.count(), threading.Lock()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(which: int | None) -> None:
        kernel, arguments, named = kept.pop(which or 0)
        with one_at_a_time:
            run(kernel, *arguments, **named)

    def pointer(value: Any) -> Any:
        return _Pointer(value) if isinstance(value, torch.Tensor) else value

    def call(self: Any, *arguments: Any, **named: Any) -> None:
        stream, which = torch.cuda.current_stream(), next(number)
        kept[which] = self, [*map(pointer, arguments)], {name: pointer(value) for name, value in named.items()}
        runtime.simulated_gpu_enqueue(stream.device_index, ctypes.c_void_p(stream.cuda_stream), work, which)

    def call_at_once(self: Any, *arguments: Any, **named: Any) -> None:
        torch.cuda.current_stream().synchronize()
        run(self, *arguments, **named)

    runtime.simulated_gpu_enqueue.argtypes = [ctypes.c_int, ctypes.c_void_p, type(work), ctypes.c_void_p]
    executor.__call__ = call if runtime.simulated_gpu_is_late() else call_at_once


def _take_the_place(engine: Any) -> None:
    import stand_in_engine

    stand_in_engine.take_the_place(engine)


if library := os.environ.get("SIMULATED_GPU_OPERATORS"):
    followers = {
        "torch": lambda torch: torch.ops.load_library(library),
        "triton.runtime.interpreter": _interpret,
        **vllm_without_kernels.BY_MODULE,
    }
    if os.environ.get("SIMULATED_GPU_STAND_IN") == "1":
        followers["tandem.rollout.engines.vllm.engine"] = _take_the_place
    sys.meta_path.insert(0, _Finder(followers))
