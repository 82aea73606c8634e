"""The time of a rank's step by phase, and by use: own work, waits for other ranks and for a processor."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist


class RankTime:
    """A rank's time of a step by use, to be read after the block."""

    compute_s = 0.0
    """Seconds outside of all collective operations."""
    waited_s = 0.0
    """Seconds inside of them: waiting for the other ranks and their data."""
    queued_s = 0.0
    """Seconds of `compute_s` in which this thread could have run, but every processor was busy; 0 if not known."""


class ProcessorWait:
    """The wait of the thread that made it for a processor: ready to run, and every processor busy.

    Linux counts it for each thread, though not every Linux does. Where none does, it is 0.
    """

    def __init__(self) -> None:
        """Count from now on."""
        self.counted_s = 0.0
        """The seconds between the beginning, or each `count`, and the next `stop`."""
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._began_s = self._total_s()

    def count(self) -> None:
        """Count from now on."""
        self._began_s = self._total_s()

    def stop(self) -> None:
        """Count no longer."""
        self.counted_s += self._total_s() - self._began_s

    def close(self) -> None:
        """Close the kernel's file."""
        if self._file is not None:
            os.close(self._file)

    def _total_s(self) -> float:
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


@contextmanager
def measured(device: torch.device) -> Iterator[RankTime]:
    """Measure the block, in which this thread computes on `device`. A block that raises leaves no times.

    A rank without others waits for none. The step reads its metrics, so that a GPU has computed all when it ends.
    """
    rank_time, queue, started = RankTime(), ProcessorWait(), time.perf_counter()
    try:
        if dist.is_initialized() and dist.get_world_size() == 1:
            yield rank_time
            rank_time.compute_s = time.perf_counter() - started
        else:
            from tandem.trainer.backends.waiting import waits_counted  # a lone rank needs none of it

            with waits_counted(device, queue) as clock:
                yield rank_time
                total_s, rank_time.waited_s = clock.read()
            rank_time.compute_s = max(0.0, total_s - rank_time.waited_s)
        queue.stop()
        rank_time.queued_s = min(rank_time.compute_s, queue.counted_s)
    finally:
        queue.close()


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of the block to the seconds of that name."""
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
