"""The time of a rank's own work in a step, apart from its waits for the other ranks.

Ranks meet in collective operations many times a step, so that a step takes all of them as long as the slowest. They
differ in the time that each spends inside those operations. `measured` hooks the functions that torch calls to begin
and to await one, as long as the block lasts, and synchronises nothing. On a CPU, where the caller waits, it uses the
clock. On a GPU, where the stream waits, it uses events in the computing stream. Operations in other streams count as
waits only when the computation needs them.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from tandem.trainer.backends.stream_clock import StreamClock, waits_of_streams

P = ParamSpec("P")
R = TypeVar("R")

_WAITS: tuple[tuple[Any, str], ...] = ((dist.Work, "wait"), (_functional_collectives, "wait_tensor"))
"""Functions that wait for an operation."""


class RankTime:
    """A rank's time of a step by use, to be read after the block."""

    compute_s = 0.0
    """Seconds outside of all collective operations."""
    waited_s = 0.0
    """Seconds inside of them: waiting for the other ranks and their data."""
    queued_s = 0.0
    """Seconds of `compute_s` in which this thread could have run, but every processor was busy; 0 if not known."""


class _Clock(Protocol):
    def around(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that waits, or may, and count the time."""
        ...

    def read(self) -> tuple[float, float]:
        """Return the seconds so far: in total, and in waits."""
        ...


@contextmanager
def measured(device: torch.device) -> Iterator[RankTime]:
    """Measure the block, in which this thread computes on `device`. A block that raises leaves no times."""
    of_gpu = device.type == "cuda"
    found = RankTime()
    with _Queue() as queue:
        clock: _Clock = StreamClock() if of_gpu else _HostClock(queue)
        queue.count()
        with _hooked(clock, [*_WAITS, *(waits_of_streams() if of_gpu else ())]):
            yield found
        queue.stop()
        total_s, found.waited_s = clock.read()
    found.compute_s = max(0.0, total_s - found.waited_s)
    found.queued_s = min(found.compute_s, queue.counted_s)


class _Queue:
    """The wait of the thread that made it for a processor: ready to run, and every processor busy.

    Linux counts it for each thread, though not every Linux does. Where none does, it is 0.
    """

    def __init__(self) -> None:
        self.counted_s = 0.0
        """The seconds between each `count` and the next `stop`."""
        self._began_s = 0.0
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> _Queue:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            os.close(self._file)

    def count(self) -> None:
        """Count from now on."""
        self._began_s = self._total_s()

    def stop(self) -> None:
        """Count no longer."""
        self.counted_s += self._total_s() - self._began_s

    def _total_s(self) -> float:
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


@contextmanager
def _hooked(clock: _Clock, calls: list[tuple[Any, str]]) -> Iterator[None]:
    """Let the clock count these functions, which torch looks up by name each time. It has no hook for them."""
    # The original attributes are put back: for a method that is not Python's, `getattr` gives a function that
    # would no longer be bound.
    real = [(owner, name, vars(owner)[name]) for owner, name in calls]
    try:
        for owner, name, _ in real:
            setattr(owner, name, _counted(clock, getattr(owner, name)))
        yield
    finally:
        for owner, name, attribute in real:
            setattr(owner, name, attribute)


def _counted(clock: _Clock, function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return clock.around(function, *args, **kwargs)

    return call


class _HostClock:
    """The clock of the thread that made it, which also runs the backward pass on a CPU."""

    def __init__(self, queue: _Queue) -> None:
        self._thread = threading.get_ident()
        self._queue = queue
        self._waited_s = 0.0
        self._started = time.perf_counter()

    def around(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != self._thread:
            return call(*args, **kwargs)
        # Between the two readings, at either end, the thread may lose its processor. In this order the queue then
        # counts too little, and a rank's own work is never said to be less than it was.
        self._queue.stop()
        started = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._waited_s += time.perf_counter() - started
            self._queue.count()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._started, self._waited_s
