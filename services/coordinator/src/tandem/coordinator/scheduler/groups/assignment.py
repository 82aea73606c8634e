"""Assignment: which engine generates which rollout groups.

`PinnedAssignment` is the plain way. A group belongs to one engine from the beginning and waits for it, whatever becomes
of that engine, so that the same run batches the same groups together. `groups.balanced` is the way of ``async_engine``.

Either way, all samples of a group that count come from one engine: a group that moves is generated again as a whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, MutableSequence, Sequence
from typing import Protocol

from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.coordinator.scheduler.groups.table import SampleGroup

CanGenerate = Callable[[str, SampleGroup], bool]
"""Whether an engine may generate a group: its weights are young enough, and it can keep the samples."""
Assigned = dict[str, list[SampleGroup]]
"""The groups that each engine is to generate now."""


class GroupAssignment(Protocol):
    """Decides which engine generates which group. It is told of all changes, and asks whether an engine can."""

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits."""
        ...

    def add(self, groups: Sequence[SampleGroup], engines: Sequence[str]) -> None:
        """Add groups that have just begun to wait."""
        ...

    def put_back(self, groups: Sequence[SampleGroup]) -> None:
        """Add groups that wait again. They still name the engine they had."""
        ...

    def choose(self, can_generate: CanGenerate, now: float) -> Assigned:
        """Assign as many waiting groups as can be generated now, and return them."""
        ...

    def finished(self, engine: str, group: SampleGroup, num_samples: int) -> None:
        """Note that an engine has finished this number of samples of a group."""
        ...

    def withdraw(self, engine: str) -> None:
        """Note that an engine has nothing left to generate, and starts afresh when it can generate again."""
        ...

    def move(self, engine: str, targets: Sequence[str]) -> bool:
        """Reassign the groups that wait for a draining engine. Return whether there were any."""
        ...

    def forget(self, engine: str) -> None:
        """Note that an engine has left, and has nothing in flight."""
        ...

    def overstayed(self, now: float) -> list[str]:
        """Return the engines that have held groups too long while others were idle, each once. Their groups move on."""
        ...

    def clear(self) -> None:
        """Forget every group."""
        ...


class PinnedAssignment:
    """Pins every group to an engine; groups that come together go to the engines in turn."""

    def __init__(self, changed: Changed = no_agenda) -> None:
        self._changed = changed
        self._waiting: Assigned = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits for its engine."""
        return bool(self._waiting)

    def add(self, groups: Sequence[SampleGroup], engines: Sequence[str]) -> None:
        """Pin each group to an engine."""
        for i, group in enumerate(groups):
            group.engine = engines[i % len(engines)]
        self.put_back(groups)

    def put_back(self, groups: Sequence[SampleGroup]) -> None:
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

    def finished(self, engine: str, group: SampleGroup, num_samples: int) -> None:
        """Do nothing: finished samples make no room for other groups."""

    def withdraw(self, engine: str) -> None:
        """Do nothing: only the waiting groups of an engine are known here."""

    def move(self, engine: str, targets: Sequence[str]) -> bool:
        """Pin the groups that wait for an engine to others, in turn."""
        groups = self._waiting.pop(engine, [])
        if groups:
            self._changed()
            self.add(groups, targets)
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


def queue(waiting: MutableSequence[SampleGroup], group: SampleGroup) -> None:
    """Insert a group behind those that are needed no later than it is."""
    at = len(waiting)
    while at and waiting[at - 1].turn > group.turn:
        at -= 1
    waiting.insert(at, group)
