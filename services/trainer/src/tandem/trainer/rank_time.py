"""The time of a rank's step by phase, and by use: own work, waits for other ranks and for a processor.

Ranks meet in collective operations many times a step, so that a step takes all of them as long as the slowest. They
differ in the time that each spends inside those operations. `waits_counted` hooks the functions that torch calls to
begin and to await one, as long as the block lasts, and synchronises nothing. On a CPU, where the caller waits, it uses
the clock. On a GPU, where the stream waits, it uses events in the computing stream. Operations in other streams count
as waits only when the computation needs them.
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


P = ParamSpec("P")
R = TypeVar("R")

_OPERATIONS = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "_end_coalescing",
)
"""Functions that begin an operation. NCCL runs those that are awaited at once in the computing stream. No release of
torch has all of these names.
"""


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
    clock: _Clock = _StreamClock() if of_gpu else _HostClock(queue)
    with _hooked(clock, [*_WAITS, *(_waits_of_streams() if of_gpu else ())]):
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


def _waits_of_streams() -> Iterator[tuple[Any, str]]:
    """Yield the functions that make a stream wait by itself, for an operation in it or for another stream."""
    yield from ((dist.ProcessGroup, name) for name in _OPERATIONS if hasattr(dist.ProcessGroup, name))
    yield torch.cuda.Stream, "wait_event"


class _StreamClock:
    """The clock of the stream that is current when it is made, whichever thread fills it."""

    def __init__(self) -> None:
        """Begin now."""
        self._stream = torch.cuda.current_stream()
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started = self._mark()

    def around(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function, and count the time for which the stream waits in it."""
        waiting = args[0] if args and isinstance(args[0], torch.cuda.Stream) else torch.cuda.current_stream()
        if waiting != self._stream:
            return call(*args, **kwargs)
        started = self._mark()
        try:
            return call(*args, **kwargs)
        finally:
            self._waits.append((started, self._mark()))

    def read(self) -> tuple[float, float]:
        """Return the seconds so far: in total, and in waits. Waits for the stream."""
        ended = self._mark()
        ended.synchronize()  # the step's metrics have been read, and were the stream's last computation
        waited_ms = sum(before.elapsed_time(after) for before, after in self._waits)
        return self._started.elapsed_time(ended) / 1e3, waited_ms / 1e3

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event
