"""A thread that monitors the GPUs of a process, if `logger.monitor_gpus` is set.

It is not part of the run: values that the driver does not give are left out, and a driver that hangs blocks only this
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tandem.config.schema import LoggerConfig
from tandem.observe.exporters.nvml import MEASURED, GpuUse, Nvml, list_visible_gpus, open_nvml

_ENDED_S = 5.0


class GpuMonitor:
    """Monitor of GPUs: it reads them at intervals, and returns means since the last call."""

    def __init__(self, logger: LoggerConfig, opened: Callable[[], Nvml | None] = open_nvml) -> None:
        self._is_on = logger.monitor_gpus
        self._interval_s = logger.gpu_monitoring.collection_interval
        self._opened = opened
        self._lock = threading.Lock()
        self._read: dict[str, list[float]] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, first: int, count: int) -> None:
        """Monitor `count` GPUs from `first`, among those that this process may use; none if there are none."""
        if not self._is_on or not count or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._watch, args=(first, count), name="gpu monitor", daemon=True)
        self._thread.start()

    def means(self) -> dict[str, float]:
        """Return the mean of each measurement since the last call, without those that were not read."""
        with self._lock:
            read, self._read = self._read, {}
        return {name: sum(values) / len(values) for name, values in read.items()}

    def close(self) -> None:
        """Stop monitoring."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_ENDED_S)

    def _watch(self, first: int, count: int) -> None:
        nvml = self._opened()
        if nvml is None:
            return
        visible = list_visible_gpus(nvml.num_gpus())
        if visible:
            gpus = [visible[(first + number) % len(visible)] for number in range(count)]
            while not self._ended.is_set():
                self._note(nvml.uses(gpus))
                self._ended.wait(self._interval_s)
        nvml.close()

    def _note(self, uses: Sequence[GpuUse]) -> None:
        with self._lock:
            for use in uses:
                for name in MEASURED:
                    value = getattr(use, name)
                    if value is not None:
                        self._read.setdefault(name, []).append(value)
