"""Which processes a run expects, and whether all of them have joined."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.common.messages import ServiceKind


class Membership:
    """The processes that have joined."""

    def __init__(self, expected: Mapping[ServiceKind, int]) -> None:
        self._expected = expected
        self._kinds: dict[str, ServiceKind] = {}

    def add(self, member: str, kind: ServiceKind) -> None:
        """Take note of a process that has joined, also in the place of one of the same name."""
        self._kinds[member] = kind

    def kind(self, member: str) -> ServiceKind | None:
        """Return what a process is, None if it has not joined."""
        return self._kinds.get(member)

    def all(self, kind: ServiceKind) -> list[str]:
        """Return the members of a kind, in the order of their index."""
        return sorted((m for m, k in self._kinds.items() if k == kind), key=lambda m: int(m.rpartition("-")[2]))

    @property
    def is_complete(self) -> bool:
        """Whether nobody is missing."""
        return len(self._kinds) == sum(self._expected.values())

    def missing(self) -> str:
        """Return how many of which kinds have not joined; nothing if all have."""
        absent = {kind: n - len(self.all(kind)) for kind, n in self._expected.items()}
        return " and ".join(f"{n} {kind}" for kind, n in absent.items() if n > 0)
