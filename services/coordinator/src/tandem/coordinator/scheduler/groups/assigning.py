"""The interface of assignments, which decide which engine generates which rollout groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.coordinator.scheduler.groups.table import Group

CanGenerate = Callable[[str, Group], bool]
"""Whether an engine may generate a group: its weights are young enough, and it can keep the samples."""
Assigned = dict[str, list[Group]]
"""The groups that each engine is to generate now."""


class Assignment(Protocol):
    """Decides which engine generates which group. It is told of all changes, and asks whether an engine can."""

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits."""
        ...

    def add(self, groups: Sequence[Group], engines: Sequence[str]) -> None:
        """Add groups that have just begun to wait."""
        ...

    def put_back(self, groups: Sequence[Group]) -> None:
        """Add groups that wait again. They still name the engine they had."""
        ...

    def choose(self, can_generate: CanGenerate, now: float) -> Assigned:
        """Assign as many waiting groups as can be generated now, and return them."""
        ...

    def finished(self, engine: str, group: Group, num_samples: int) -> None:
        """Note that an engine has finished this number of samples of a group."""
        ...

    def withdraw(self, engine: str) -> None:
        """Note that an engine has nothing left to generate, and starts afresh when it can generate again."""
        ...

    def move(self, engine: str, others: Sequence[str]) -> bool:
        """Reassign the groups that wait for a draining engine. Return whether there were any."""
        ...

    def forget(self, engine: str) -> None:
        """Note that an engine has left, and has nothing in flight."""
        ...

    def overstayed(self, now: float) -> list[str]:
        """Return each engine with groups that are to move on, once; call `withdraw_slow` for each."""
        ...

    def clear(self) -> None:
        """Forget every group."""
        ...
