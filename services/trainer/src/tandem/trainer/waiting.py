"""Tell a rank's own work in a step from its waits for the other ranks.

Ranks meet in collective operations many times a step, so that a step takes all of them as long as the slowest; what
tells them apart is how much of it each has spent inside those operations. `measured` takes that from what torch calls
to begin one and to wait for one, for as long as the block lasts, and synchronises nothing: on a CPU, where the caller
waits, by the clock; on a GPU, whose stream does, by events in the stream that computes. What goes on beside the
computation in other streams is no wait until the computation needs it.
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

P = ParamSpec("P")
R = TypeVar("R")

_WAITS: tuple[tuple[Any, str], ...] = ((dist.Work, "wait"), (_functional_collectives, "wait_tensor"))
"""What waits for an operation."""
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
"""What begins one; NCCL carries out those that are waited for at once in the stream that computes. No release of torch
has all of these names."""


class RankTime:
    """What a rank has done with the time of a step; to be read after the block."""

    compute_s = 0.0
    """Outside of all collective operations."""
    waited_s = 0.0
    """Inside of them: waiting for the other ranks, and for what they send."""


class _Clock(Protocol):
    def around(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call what waits, or may, and count the time."""
        ...

    def read(self) -> tuple[float, float]:
        """Return the seconds so far: of all, and of waits."""
        ...


@contextmanager
def measured(device: torch.device) -> Iterator[RankTime]:
    """Measure the block, in which this thread computes on `device`; what it raises leaves no times."""
    of_gpu = device.type == "cuda"
    clock: _Clock = _StreamClock() if of_gpu else _HostClock()
    found = RankTime()
    with _hooked(clock, [*_WAITS, *(_of_streams() if of_gpu else ())]):
        yield found
    total_s, found.waited_s = clock.read()
    found.compute_s = max(0.0, total_s - found.waited_s)


def _of_streams() -> Iterator[tuple[Any, str]]:
    """Yield what makes a stream wait on its own: for an operation in it, or for another stream."""
    yield from ((dist.ProcessGroup, name) for name in _OPERATIONS if hasattr(dist.ProcessGroup, name))
    yield torch.cuda.Stream, "wait_event"


@contextmanager
def _hooked(clock: _Clock, calls: list[tuple[Any, str]]) -> Iterator[None]:
    """Let the clock count these functions, which torch looks up by name each time; it has no hook for them."""
    # What is put back is what was there: of a method that is not Python's, `getattr` gives a function that would no
    # longer be bound.
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
    """Of the thread that made it: the backward pass on a CPU is in it as well."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._waited_s = 0.0
        self._started = time.perf_counter()

    def around(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != self._thread:
            return call(*args, **kwargs)
        started = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._waited_s += time.perf_counter() - started

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._started, self._waited_s


class _StreamClock:
    """Of the stream that is current when it is made, whichever thread fills it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started = self._mark()

    def around(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        waiting = args[0] if args and isinstance(args[0], torch.cuda.Stream) else torch.cuda.current_stream()
        if waiting != self._stream:
            return call(*args, **kwargs)
        started = self._mark()
        try:
            return call(*args, **kwargs)
        finally:
            self._waits.append((started, self._mark()))

    def read(self) -> tuple[float, float]:
        ended = self._mark()
        ended.synchronize()  # the step's metrics have been read, and were the last that the stream computed
        waited_ms = sum(before.elapsed_time(after) for before, after in self._waits)
        return self._started.elapsed_time(ended) / 1e3, waited_ms / 1e3

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event
