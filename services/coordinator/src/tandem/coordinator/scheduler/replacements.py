"""How many lost processes a run may still have replaced, of whatever kind, within a stretch of time.

A run of weeks may lose one now and then; one that loses them one after the other does not get on.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.common.errors import ServiceLost
from tandem.launch.restarts import within


class Failures:
    """What processes have failed with that were replaced for it."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int, str]] = set()

    def is_new(self, member: str, step: int, error: str) -> bool:
        """Note an error; return whether the process, and that which it has replaced, has not failed so in the step."""
        seen = (member, step, error) in self._seen
        self._seen.add((member, step, error))
        return not seen


class Replacements:
    """The losses that count, and when they were."""

    def __init__(self, most: int, window_s: float, at: Iterable[float] = ()) -> None:
        """At most `most` are replaced within `window_s`; `at` says when some were already."""
        self._most = most
        self._window_s = window_s
        self._at = [*at]

    def are_left(self, now: float) -> bool:
        """Tell whether one more may be replaced."""
        self._at = within(self._window_s, now, self._at)
        return len(self._at) < self._most

    def count(self, now: float, member: str, doing: str, why: str) -> None:
        """Count the loss of a process that is to be replaced. Raises `ServiceLost` if it must not be any more."""
        if not self.are_left(now):
            raise ServiceLost(member, doing, why + self.spent())
        self._at.append(now)

    def spent(self) -> str:
        """Return what to add to an error, to say that processes were replaced before."""
        return f"; processes were replaced {self._most} times before" if self._most else ""
