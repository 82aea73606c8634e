"""Measure the memory that a process takes to carry out a command, and the memory that is free."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path
from typing import Any

from tandem.common.messages import MemoryUse

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
_HOST = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


class MemoryMeter:
    """The peak memory between `begin` and `use`: bytes allocated on the GPU if torch uses one, else resident bytes.

    Resident memory includes memory shared with other processes: libraries, and parameters read in place. Where the
    kernel does not allow the peak to be reset, the larger of the first and the last resident size stands in for it.
    Where no descriptor is free to read either, the peak of the process's life stands in for both.
    """

    _at_begin = 0

    def begin(self) -> None:
        """Reset the peak."""
        cuda = _find_cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
            return
        try:
            _CLEAR_REFS.write_text(_FORGET_PEAK)
            self._at_begin = 0
        except OSError:
            with contextlib.suppress(OSError):
                self._at_begin = _read_kilobytes(_STATUS, "VmRSS")

    def use(self) -> MemoryUse:
        """Return the peak since `begin`, and the memory held now."""
        cuda = _find_cuda()
        if cuda is not None:
            reserved = cuda.max_memory_reserved()
            return MemoryUse(peak=cuda.max_memory_allocated(), held=cuda.memory_allocated(), reserved=reserved)
        try:
            resident = _read_kilobytes(_STATUS, "VmRSS")
        except OSError:  # no descriptor is free, which ends no process for the sake of a metric
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return MemoryUse(peak=peak, held=peak)
        peak = max(self._at_begin, resident) if self._at_begin else _read_kilobytes(_STATUS, "VmHWM")
        return MemoryUse(peak=peak, held=resident)


def available_bytes() -> int:
    """Return the free memory of the host, or of the container (cgroup v2) if that has a limit.

    The page cache counts as free, since it can be dropped.
    """
    free = _read_kilobytes(_HOST, "MemAvailable")
    try:
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (_CONTAINER / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # not in a container, or one without a limit ("max")
        return free
    return min(free, limit - used + (int(cached[1]) if cached else 0))


def _read_kilobytes(path: Path, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    assert match is not None, f"{path} has no {field}"
    return int(match[1]) * 1024


def _find_cuda() -> Any:
    """Return `torch.cuda` if this process uses it."""
    import torch  # here, so that processes without torch can import this package

    return torch.cuda if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
