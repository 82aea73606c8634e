"""Members: which processes a run expects, which have joined, and how many lost ones it may still have replaced.

A run of weeks may lose a process now and then; one that loses them one after the other makes no progress.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tandem.common.errors import ServiceLost
from tandem.common.messages import ServiceKind
from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.launch.restarts import within


class Membership:
    """The processes that have joined."""

    def __init__(
        self, expected: Mapping[ServiceKind, int], departed: Collection[str] = (), changed: Changed = no_agenda
    ) -> None:
        """`departed` have left for good, of those that are counted."""
        self._changed = changed
        self._expected: dict[ServiceKind, list[str]] = {
            kind: [name for name in (f"{kind}-{index}" for index in range(count)) if name not in departed]
            for kind, count in expected.items()
        }
        self._kinds: dict[str, ServiceKind] = {}

    def add(self, member: str, kind: ServiceKind) -> None:
        """Take note of a process that has joined, also in the place of one of the same name."""
        self._kinds[member] = kind
        self._changed()

    def remove(self, member: str) -> None:
        """Take note of a process that has left."""
        self._kinds.pop(member, None)
        self._changed()

    def kind(self, member: str) -> ServiceKind | None:
        """Return what a process is, None if it has not joined."""
        return self._kinds.get(member)

    def all(self, kind: ServiceKind) -> list[str]:
        """Return the members of a kind, in the order of their index."""
        return sorted((m for m, k in self._kinds.items() if k == kind), key=lambda m: int(m.rpartition("-")[2]))

    @property
    def is_complete(self) -> bool:
        """Whether no process is missing."""
        return not any(self._num_missing(kind) for kind in self._expected)

    def missing(self) -> str:
        """Return how many of which kinds have not joined; nothing if all have."""
        absent = {kind: self._num_missing(kind) for kind in self._expected}
        return " and ".join(f"{n} {kind}" for kind, n in absent.items() if n > 0)

    def _num_missing(self, kind: ServiceKind) -> int:
        num = sum(name not in self._kinds for name in self._expected[kind])
        return num if num or kind in self._kinds.values() else 1  # whichever they are, one has to be there


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
