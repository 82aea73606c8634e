"""Descriptors held back for the files that a process must open even when no other is free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_IN_RESERVE = 6
"""Descriptors of a reserve: a file, the one beside it, its folder, and a few for those that other threads snatch."""


class Reserve:
    """Descriptors held for files that must be opened even when the process has no other descriptor left.

    Use it from one thread. Descriptors that other threads snatch while they are lent are taken back later, after any
    further use.
    """

    def __init__(self, num: int = _IN_RESERVE) -> None:
        """Open the descriptors, as many as there are."""
        self._num = num
        self._held: list[int] = []
        self._fill()

    @property
    def num_held(self) -> int:
        """Number of descriptors in the reserve now."""
        return len(self._held)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give the descriptors up for what the block opens, and take them back afterwards."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Give the descriptors up."""
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # none is free now
            while len(self._held) < self._num:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
