"""Recent restarts, counted within a window."""

from __future__ import annotations

from collections.abc import Iterable


def select_within(window_s: float, now: float, times: Iterable[float]) -> list[float]:
    """Return the times at most `window_s` before `now`; all are from `time.monotonic`."""
    return [at for at in times if now - at <= window_s]
