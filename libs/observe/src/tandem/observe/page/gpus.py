"""The GPUs of this machine, read with the driver's own tool; none without it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time

import msgspec

_FIELDS = ("index", "name", "memory.total", "memory.used", "utilization.gpu")
_PAUSE_S = 2.0
"""Shortest interval between two calls of the tool, however many requests there are."""
_TIMEOUT_S = 5.0
_MIB = 2**20


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one GPU."""

    host: str
    index: int
    name: str
    memory_gb: float
    """Total memory; 10^9 bytes, as everywhere."""
    used_gb: float
    utilisation: float | None
    """Share of the most recent moments in which it computed; None if the driver does not report it."""


class Gpus:
    """Reader of GPUs, which calls the tool only on request."""

    def __init__(self, tool: str = "nvidia-smi") -> None:
        self._tool = shutil.which(tool)
        self._lock = threading.Lock()
        self._asked_at = -_PAUSE_S
        self._found: list[Gpu] = []

    def read(self) -> list[Gpu]:
        """Return the GPUs' state of at most two seconds ago."""
        if self._tool is None:
            return []
        with self._lock:
            if time.monotonic() - self._asked_at >= _PAUSE_S:
                self._found = _ask(self._tool)
                self._asked_at = time.monotonic()
            return self._found


def _ask(tool: str) -> list[Gpu]:
    command = [tool, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):  # the driver is not loaded, or hangs
        return []
    return [gpu for line in done.stdout.splitlines() if (gpu := _parse(line)) is not None]


def _parse(line: str) -> Gpu | None:
    """Parse a line of the tool's output; return None if it describes no GPU."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(_FIELDS) or not fields[0].isdigit():
        return None
    total, used = _number(fields[2]), _number(fields[3])
    utilisation = _number(fields[4])
    return Gpu(
        host=socket.gethostname(),
        index=int(fields[0]),
        name=fields[1],
        memory_gb=(total or 0.0) * _MIB / 1e9,
        used_gb=(used or 0.0) * _MIB / 1e9,
        utilisation=None if utilisation is None else utilisation / 100,
    )


def _number(text: str) -> float | None:
    """Return a number; None for other text, such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return None
