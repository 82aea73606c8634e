"""Processes: those that a run expects, those that have joined, and the replacements left.

A run of weeks may lose a process now and then; one that loses them one after the other makes no progress.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping

from tandem.common.errors import ServiceLost
from tandem.common.messages import ServiceKind
from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.launch.child import select_within


class JoinedProcesses:
    """The processes that have joined."""

    def __init__(
        self, expected: Mapping[ServiceKind, int], departed: Collection[str] = (), changed: Changed = no_agenda
    ) -> None:
        """Take the expected processes. Those in `departed` are among them, and have left for good."""
        self._changed = changed
        self._expected: dict[ServiceKind, list[str]] = {
            kind: [name for name in (f"{kind}-{index}" for index in range(count)) if name not in departed]
            for kind, count in expected.items()
        }
        self._kinds: dict[str, ServiceKind] = {}
        self.public_keys: dict[str, str] = {}
        self.of_kind: dict[ServiceKind, list[str]] = {"trainer": [], "rollout": [], "refit": []}
        """The processes of each kind, in the order of their index."""

    def add(self, name: str, kind: ServiceKind, public_key: str = "") -> None:
        """Note a process that has joined, perhaps in the place of one of the same name."""
        if name not in self._kinds:
            bisect.insort(self.of_kind[kind], name, key=_index_of)
        self._kinds[name], self.public_keys[name] = kind, public_key
        self._changed()

    def remove(self, name: str) -> None:
        """Note a process that has left."""
        if name in self._kinds:
            self.of_kind[self._kinds.pop(name)].remove(name)
            del self.public_keys[name]
        self._changed()

    def kind(self, name: str) -> ServiceKind | None:
        """Return the kind of a process; None if it has not joined."""
        return self._kinds.get(name)

    @property
    def is_complete(self) -> bool:
        """Whether no process is missing."""
        return not any(self._num_missing(kind) for kind in self._expected)

    def missing(self) -> str:
        """Return how many processes of each kind have not joined; an empty text if all have."""
        absent = {kind: self._num_missing(kind) for kind in self._expected}
        return " and ".join(f"{n} {kind}" for kind, n in absent.items() if n > 0)

    def _num_missing(self, kind: ServiceKind) -> int:
        num = sum(name not in self._kinds for name in self._expected[kind])
        return num if num or kind in self._kinds.values() else 1  # one of the kind must be there, whichever it is


def _index_of(name: str) -> int:
    return int(name.rpartition("-")[2])


class ProcessFailures:
    """The errors of processes that were replaced because of them."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int, str]] = set()

    def is_new(self, name: str, step: int, error: str) -> bool:
        """Note an error; return whether it is the first such error of the process and its predecessor in the step."""
        seen = (name, step, error) in self._seen
        self._seen.add((name, step, error))
        return not seen


class CountedReplacements:
    """The losses that count toward the limit, and their times."""

    def __init__(self, limit: int, window_s: float, at: Iterable[float] = ()) -> None:
        """Allow at most `limit` replacements within `window_s`. `at` has the times of earlier ones."""
        self._most = limit
        self._window_s = window_s
        self._at = [*at]

    def are_left(self, now: float) -> bool:
        """Tell whether one more process may be replaced."""
        self._at = select_within(self._window_s, now, self._at)
        return len(self._at) < self._most

    def count(self, now: float, name: str, doing: str, reason: str) -> None:
        """Count the loss of a process that is to be replaced. Raises `ServiceLost` at the limit."""
        if not self.are_left(now):
            raise ServiceLost(name, doing, reason + self.spent())
        self._at.append(now)

    def spent(self) -> str:
        """Return a suffix for error messages which says that processes were replaced before."""
        return f"; processes were replaced {self._most} times before" if self._most else ""
