"""Bound what environments print, and escape what would move a terminal's cursor."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

from tandem.common.texts import visible

MOST_OF_CALL = 4000
"""Characters that one call of an environment may print."""
MOST_OF_MINUTE = 40_000
"""Characters that all calls of a process may print within a minute: a step may have thousands of calls."""
_MINUTE_S = 60.0


class _Minute:
    """The characters left of this process's minute."""

    def __init__(self) -> None:
        self._began = -math.inf
        self._left = 0

    def take(self, wanted: int) -> int:
        """Return how many of these characters may be printed; announce the first that may not."""
        now = time.monotonic()
        if now - self._began > _MINUTE_S:
            self._began, self._left = now, MOST_OF_MINUTE
        given = min(wanted, max(self._left, 0))
        if given < wanted and self._left >= 0:
            _say(f"environments have printed {MOST_OF_MINUTE} characters within a minute; the rest is left out")
            self._left = -1
        else:
            self._left -= given
        return given


_minute = _Minute()


class _Allowance:
    """The characters left of a call's allowance, and how many more it wanted."""

    def __init__(self) -> None:
        self._left = MOST_OF_CALL
        self.num_left_out = 0

    def taken(self, text: str) -> str:
        """Return the part of a text that may be printed."""
        kept = text[: _minute.take(min(self._left, len(text)))]
        self._left -= len(kept)
        self.num_left_out += len(text) - len(kept)
        return visible(kept)


_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


class _Bounded:
    """A stream that enforces the allowance of the current call, if there is one in this thread or task."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the part of the text that is allowed."""
        allowance = _allowance.get()
        self._stream.write(text if allowance is None else allowance.taken(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bound what this thread or task prints in the block; at its end, say how much was left out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Bounded):
            setattr(sys, name, _Bounded(stream))
    allowance = _Allowance()
    before = _allowance.set(allowance)
    try:
        yield
    finally:
        _allowance.reset(before)
        note = f"... {allowance.num_left_out} more characters that the environment printed are left out"
        if allowance.num_left_out and _minute.take(len(note)) == len(note):
            _say(note)


def _say(note: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full
        print(f"\n{note}", file=getattr(sys.stderr, "_stream", sys.stderr), flush=True)
