"""The clock of a GPU's stream for `tandem.trainer.backends.waiting`: events around what makes it wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

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


def waits_of_streams() -> Iterator[tuple[Any, str]]:
    """Yield the functions that make a stream wait by itself, for an operation in it or for another stream."""
    yield from ((dist.ProcessGroup, name) for name in _OPERATIONS if hasattr(dist.ProcessGroup, name))
    yield torch.cuda.Stream, "wait_event"


class StreamClock:
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
