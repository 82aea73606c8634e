"""The GPUs of this machine as the page shows them; none without a driver."""

from __future__ import annotations

import socket
import threading
import time

import msgspec

from tandem.observe.exporters.nvml import GpuUse, use_nvml

_PAUSE_S = 2.0
"""Shortest interval between two readings, however many requests there are."""


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one GPU."""

    host: str
    index: int
    name: str
    memory_gb: float
    """Total memory; 10^9 bytes, as everywhere."""
    used_gb: float
    utilisation: float | None
    """Share of the most recent moments in which it computed; None if the driver does not report it."""


class GpuReader:
    """Reader of GPUs, which asks the driver only on request."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._asked_at = -_PAUSE_S
        self._found: list[GpuState] = []

    def read(self) -> list[GpuState]:
        """Return the GPUs' state of at most two seconds ago; while the driver is being asked, the one before.

        So a driver that hangs blocks one request, and no other.
        """
        if self._asking.acquire(blocking=False):
            try:
                if time.monotonic() - self._asked_at >= _PAUSE_S:
                    with use_nvml() as nvml:
                        self._found = [] if nvml is None else [_gpu(use) for use in nvml.uses()]
                    self._asked_at = time.monotonic()
            finally:
                self._asking.release()
        return self._found


def _gpu(use: GpuUse) -> GpuState:
    return GpuState(
        host=socket.gethostname(),
        index=use.index,
        name=use.name,
        memory_gb=use.memory_gb or 0.0,
        used_gb=use.used_gb or 0.0,
        utilisation=use.utilisation,
    )
