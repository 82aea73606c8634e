"""Bound what environments print, and escape what would move a terminal's cursor."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Self, TextIO

from tandem.common.texts import visible

MOST = 20_000
"""Characters that a process of an environment may print in a step; in a minute, where no step is known."""
_MINUTE_S = 60.0


class _Allowance:
    """The characters left of a step or minute, and how many more were wanted.

    Calls of an earlier step than the newest count for the newest: a process has one allowance at a time, whatever the
    order of its calls.
    """

    def __init__(self) -> None:
        self._period = -math.inf
        self._name = ""
        self._left = 0
        self._num_left_out = 0

    def of(self, period: float, name: str) -> Self:
        """Return the allowance, renewed if this is a later period."""
        if period > self._period:
            if self._num_left_out:
                self.end()
            self._period, self._name, self._left = period, name, MOST
        return self

    def take(self, text: str) -> str:
        """Return the part of a text that may be printed."""
        printed = text[: self._left]
        self._left -= len(printed)
        self._num_left_out += len(text) - len(printed)
        return visible(printed)

    def end(self) -> None:
        """Say how much was left out, if anything was."""
        if self._num_left_out:
            _say(f"prints of environments, {self._name}: {self._num_left_out} more characters not shown")
        self._num_left_out = 0


_of_step, _of_minute = _Allowance(), _Allowance()
_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


class _Bounded:
    """A stream that enforces the allowance of the call in this thread or task, if there is one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the part of the text that is allowed."""
        allowance = _allowance.get()
        self._stream.write(text if allowance is None else allowance.take(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def bounded(step: int | None = None) -> Iterator[None]:
    """Bound what this thread or task prints in the block, for a step of the run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Bounded):
            setattr(sys, name, _Bounded(stream))
    if step is None:
        minute = time.monotonic() // _MINUTE_S
        before = _allowance.set(_of_minute.of(minute, "a minute"))
    else:
        before = _allowance.set(_of_step.of(step, f"step {step}"))
    try:
        yield
    finally:
        _allowance.reset(before)


def say_left_out() -> None:
    """Say at once how much was left out so far, before the process ends."""
    for allowance in (_of_step, _of_minute):
        allowance.end()


def _say(note: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full
        print(f"\n{note}", file=getattr(sys.stderr, "_stream", sys.stderr), flush=True)
