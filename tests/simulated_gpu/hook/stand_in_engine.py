"""An engine in the place of vLLM's: with what that does with the memory of a GPU, without the time that it takes.

It decodes as the embedded engine does, on the GPU. Its weights lie in memory that is mapped apart, as vLLM's do in its
sleep mode: asleep they are unmapped and wait in host memory, and whoever reads them then crashes; awake they lie at the
addresses that they had. Refits write them in place.

As it is built it may measure free memory for a while (SIMULATED_GPU_MEASURES, seconds), and ends if that changes. So
does vLLM if others give memory back meanwhile; it takes less if they take some.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tandem.rollout.engines import transformers

_GRANULARITY = 2 << 20
_SLOTS = 16


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("rest", ctypes.c_char * 16),
    )


class Mapped:
    """Memory of the current device that may be given back, and comes back at the same address."""

    def __init__(self, num_bytes: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._num_bytes = -(-num_bytes // _GRANULARITY) * _GRANULARITY
        self._address = ctypes.c_uint64()
        self._kept: torch.Tensor | None = None
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._size, ctypes.c_size_t(0), 0, 0)
        self._map()
        self.__cuda_array_interface__ = {
            "data": (self._address.value, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }
        self.bytes_ = torch.as_tensor(self, device="cuda")

    def sleep(self) -> None:
        """Give the memory back; the bytes wait in host memory."""
        self._kept = self.bytes_.cpu()
        self._call("cuMemUnmap", self._address, self._size)

    def wake(self) -> None:
        """Take memory again, with the same bytes."""
        assert self._kept is not None
        self._map()
        self.bytes_.copy_(self._kept)
        self._kept = None

    @property
    def _size(self) -> ctypes.c_size_t:
        return ctypes.c_size_t(self._num_bytes)

    def _map(self) -> None:
        handle = ctypes.c_uint64()
        properties = _Properties(type=1, location=_Location(1, torch.cuda.current_device()))
        self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(properties), ctypes.c_uint64(0))
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._call("cuMemRelease", handle)  # with the mapping it goes

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            raise MemoryError(f"{name} of {self._num_bytes} bytes: {status}")


class StandInEngine(transformers.TransformersEngine):
    """Takes the arguments of `tandem.rollout.engines.vllm.engine.VllmEngine`."""

    weights_sleep = True

    def __init__(
        self,
        model_folder: Path,
        settings: Any,
        *,
        extra: Mapping[str, Any] | None = None,
        experts: Any = None,
        mask_format: Any = None,
        config_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self._mapped: list[Mapped] = []
        _measure(float(os.environ.get("SIMULATED_GPU_MEASURES", "0")))
        load_skeleton, transformers.load_skeleton = transformers.load_skeleton, self._load  # type: ignore[attr-defined]
        self._load_skeleton = load_skeleton
        try:
            with torch.device("cuda"):
                super().__init__(
                    model_folder,
                    num_slots=_SLOTS,
                    max_total_sequence_length=settings.max_model_len,
                    dtype=settings.precision,
                    experts=experts,
                    mask_format=mask_format,
                    config_overrides=config_overrides,
                )
        finally:
            transformers.load_skeleton = load_skeleton  # type: ignore[attr-defined]

    def sleep(self) -> None:
        """Release the cache, and unmap the weights."""
        is_asleep = self._is_asleep
        super().sleep()
        if not is_asleep:
            torch.cuda.synchronize()
            for mapped in self._mapped:
                mapped.sleep()

    def wake(self) -> None:
        """Map the weights again."""
        if self._is_asleep:
            for mapped in self._mapped:
                mapped.wake()
        super().wake()

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        model = self._load_skeleton(*args, **kwargs)
        for parameter in model.parameters():  # each that is tied once
            mapped = Mapped(parameter.nbytes)
            parameter.data = mapped.bytes_.view(parameter.dtype).view(parameter.shape)
            self._mapped.append(mapped)
        return model

    def _forward(self) -> torch.Tensor:
        return super()._forward().cpu()  # where tokens are drawn


def _measure(seconds: float) -> None:
    """See for some seconds that free memory does not change, as it would if another process worked on the GPU."""
    free, _ = torch.cuda.mem_get_info()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        now, _ = torch.cuda.mem_get_info()
        assert now == free, f"Error in memory profiling. Initial free memory {free}, current free memory {now}."
        time.sleep(0.01)


def take_the_place(engine: Any) -> None:
    """Put it in the place of vLLM's engine."""
    engine.VllmEngine = StandInEngine
