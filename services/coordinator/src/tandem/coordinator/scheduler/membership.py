"""Which processes a run expects, and whether all of them have joined."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tandem.common.messages import ServiceKind
from tandem.coordinator.scheduler.agenda import Changed, no_agenda


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
        """Whether nobody is missing."""
        return not any(self._num_missing(kind) for kind in self._expected)

    def missing(self) -> str:
        """Return how many of which kinds have not joined; nothing if all have."""
        absent = {kind: self._num_missing(kind) for kind in self._expected}
        return " and ".join(f"{n} {kind}" for kind, n in absent.items() if n > 0)

    def _num_missing(self, kind: ServiceKind) -> int:
        num = sum(name not in self._kinds for name in self._expected[kind])
        return num if num or kind in self._kinds.values() else 1  # whoever they are, somebody has to be there
