"""Stalls: times when a process could not listen, so that it must not call others silent."""

from __future__ import annotations

import time


class Stalls:
    """The time for which a listening thread was kept from listening.

    Its process, or the whole machine, was stopped, or its disk did not respond.
    """

    def __init__(self) -> None:
        self._listened_at = time.monotonic()

    def until(self, now: float, usual_s: float) -> float:
        """Return the seconds since the last call in excess of `usual_s`, to be subtracted from every measured
        silence."""
        stall_s = max(0.0, now - self._listened_at - usual_s)
        self._listened_at = now
        return stall_s
