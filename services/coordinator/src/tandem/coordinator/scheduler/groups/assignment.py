"""Assignment: which engine generates which rollout groups.

`PinnedAssignment` is the plain way. A group belongs to one engine from the beginning and waits for it, whatever becomes
of that engine, so that the same run batches the same groups together. `groups.balanced` is the way of ``async_engine``.

Either way, all samples of a group that count come from one engine: a group that moves is generated again as a whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import MutableSequence, Sequence

from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.coordinator.scheduler.groups.assigning import Assigned, CanGenerate
from tandem.coordinator.scheduler.groups.table import Group


class PinnedAssignment:
    """Pins every group to an engine; groups that come together go to the engines in turn."""

    def __init__(self, changed: Changed = no_agenda) -> None:
        self._changed = changed
        self._waiting: Assigned = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits for its engine."""
        return bool(self._waiting)

    def add(self, groups: Sequence[Group], engines: Sequence[str]) -> None:
        """Pin each group to an engine."""
        for i, group in enumerate(groups):
            group.engine = engines[i % len(engines)]
        self.put_back(groups)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Let groups wait for their engine again."""
        for group in groups:
            assert group.engine is not None, "every group has been pinned"
            queue(self._waiting.setdefault(group.engine, []), group)
        self._changed()

    def choose(self, can_generate: CanGenerate, now: float) -> Assigned:
        """Give every engine the groups that wait for it, as far as it can generate them."""
        assigned: Assigned = {}
        for engine, groups in [*self._waiting.items()]:
            able = [*itertools.takewhile(functools.partial(can_generate, engine), groups)]
            if able:
                assigned[engine] = able
                self._waiting[engine] = groups[len(able) :]
                if not self._waiting[engine]:
                    del self._waiting[engine]
        return assigned

    def finished(self, engine: str, group: Group, num_samples: int) -> None:
        """Do nothing: finished samples make no room for other groups."""

    def withdraw(self, engine: str) -> None:
        """Do nothing: only the waiting groups of an engine are known here."""

    def move(self, engine: str, others: Sequence[str]) -> bool:
        """Pin the groups that wait for an engine to others, in turn."""
        groups = self._waiting.pop(engine, [])
        if groups:
            self._changed()
            self.add(groups, others)
        return bool(groups)

    def forget(self, engine: str) -> None:
        """Do nothing: only the waiting groups of an engine are known here."""

    def overstayed(self, now: float) -> list[str]:
        """Return none: no engine is ever too slow."""
        return []

    def clear(self) -> None:
        """Forget the waiting groups."""
        self._waiting.clear()
        self._changed()


def queue(waiting: MutableSequence[Group], group: Group) -> None:
    """Insert a group behind those that are needed no later than it is."""
    at = len(waiting)
    while at and _turn(waiting[at - 1]) > _turn(group):
        at -= 1
    waiting.insert(at, group)


def _turn(group: Group) -> tuple[bool, int]:
    """Return the sort key of a group. A step waits for its validation, which stores nothing, and then for the step
    before it.
    """
    return group.purpose != "validate", group.step
