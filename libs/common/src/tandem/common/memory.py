"""Measure how much memory a process takes while it carries out an order, and how much there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tandem.common.messages import MemoryUse

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
_HOST = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


class MemoryMeter:
    """The peak between `begin` and `use`: bytes allocated on the GPU if torch uses one here, else bytes resident.

    Resident memory counts what is shared with other processes, libraries and parameters read in place included. A
    kernel that lets nobody forget the peak so far is asked what is resident at the beginning and at the end.
    """

    def __init__(self) -> None:
        self._at_begin = 0

    def begin(self) -> None:
        """Forget the peak so far."""
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
            return
        try:
            _CLEAR_REFS.write_text(_FORGET_PEAK)
            self._at_begin = 0
        except OSError:
            self._at_begin = _resident("VmRSS")

    def use(self) -> MemoryUse:
        """Return the peak since `begin`, and what is held now."""
        cuda = _cuda()
        if cuda is not None:
            return MemoryUse(peak=cuda.max_memory_allocated(), held=cuda.memory_allocated())
        held = _resident("VmRSS")
        peak = max(self._at_begin, held) if self._at_begin else _resident("VmHWM")
        return MemoryUse(peak=peak, held=held)


def available_bytes() -> int:
    """Return what the host, or the container (cgroup v2) where that has a limit, can still give out.

    Files that are in memory only to be read again count: they make room.
    """
    free = _kilobytes(_HOST, "MemAvailable")
    try:
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (_CONTAINER / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # there is no container, or it may have all ("max")
        return free
    return min(free, limit - used + (int(cached[1]) if cached else 0))


def _resident(field: str) -> int:
    return _kilobytes(_STATUS, field)


def _kilobytes(path: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    assert found is not None, f"{path} has no {field}"
    return int(found[1]) * 1024


def _cuda() -> Any:
    """Return `torch.cuda` if this process computes there."""
    import torch  # here, so that processes without torch can import this package

    return torch.cuda if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
