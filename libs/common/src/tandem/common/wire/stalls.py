"""How long a process was kept from listening: it cannot say then that others were silent."""

from __future__ import annotations

import time


class Stalls:
    """Of a thread that listens to others, how long it was kept from it.

    Its process, or the whole machine, was stopped, or its disk did not answer.
    """

    def __init__(self) -> None:
        self._listened_at = time.monotonic()

    def until(self, now: float, usual_s: float) -> float:
        """Return the seconds since the last call beyond the usual ones between two, to be taken off all silences."""
        stall_s = max(0.0, now - self._listened_at - usual_s)
        self._listened_at = now
        return stall_s
