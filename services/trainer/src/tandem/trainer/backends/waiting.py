"""The time that a rank waits for the other ranks, in the middle of its own work.

Ranks meet in collective operations many times a step, so that a step takes all of them as long as the slowest. They
differ in the time that each spends inside those operations. `waits_counted` hooks the functions that torch calls to
begin and to await one, as long as the block lasts, and synchronises nothing. On a CPU, where the caller waits, it uses
the clock. On a GPU, where the stream waits, it uses events in the computing stream. Operations in other streams count
as waits only when the computation needs them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from tandem.trainer.backends.stream_clock import StreamClock, waits_of_streams

P = ParamSpec("P")
R = TypeVar("R")

_WAITS: tuple[tuple[Any, str], ...] = ((dist.Work, "wait"), (_functional_collectives, "wait_tensor"))
"""Functions that wait for an operation."""


class _Clock(Protocol):
    def around(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that waits, or may, and count the time."""
        ...

    def read(self) -> tuple[float, float]:
        """Return the seconds so far: in total, and in waits."""
        ...


class _Queue(Protocol):
    """The thread's queue for a processor, which counts as a wait of its own only outside of these waits."""

    def count(self) -> None:
        """Count from now on."""
        ...

    def stop(self) -> None:
        """Count no longer."""
        ...


@contextmanager
def waits_counted(device: torch.device, queue: _Queue) -> Iterator[_Clock]:
    """Count the waits for other ranks in the block, in which this thread computes on `device`."""
    of_gpu = device.type == "cuda"
    clock: _Clock = StreamClock() if of_gpu else _HostClock(queue)
    with _hooked(clock, [*_WAITS, *(waits_of_streams() if of_gpu else ())]):
        yield clock


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
