"""The table of restored groups: those generated for later steps before the run was interrupted.

A restored group is trained on without generating it again, as long as the run has the weights that made it. It has them
while every step since the checkpoint trains on the same groups as before. Once a group of a step is generated again,
the step's weights may differ. Then groups that were made with these or later weights are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.coordinator.scheduler.events import Place, RestoredGroup
from tandem.coordinator.scheduler.groups.table import SampleGroup


class RestoredGroups:
    """The restored groups, until their step has trained."""

    def __init__(self, groups: Mapping[Place, RestoredGroup]) -> None:
        self.groups = dict(groups)
        self._restored: set[int] = set()
        """The ids of the commands that restored groups from disk."""

    def has(self, group: SampleGroup) -> bool:
        """Tell whether a group is restored, and need not be generated."""
        return group.purpose == "train" and (group.step, group.number) in self.groups

    def is_restored(self, request: int) -> bool:
        """Tell whether a command restores groups from disk."""
        return request in self._restored

    def files(self, groups: Sequence[SampleGroup], request: int) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return the locations of these groups, which a command restores."""
        self._restored.add(request)
        locations: dict[str, list[tuple[int, int]]] = {}
        for group in groups:
            restored = self.groups[group.step, group.number]
            locations.setdefault(restored.file, []).append((restored.command_id, group.number))
        return {file: tuple(keys) for file, keys in locations.items()}

    def lose(self, groups: Sequence[SampleGroup]) -> None:
        """Note that groups cannot be read."""
        for group in groups:
            self.groups.pop((group.step, group.number), None)

    def drop_from(self, version: int) -> set[Place]:
        """Drop and return the groups made with this version of the weights, which differs now, or with a later one."""
        dropped = {place for place, group in self.groups.items() if group.newest_version >= version}
        for place in dropped:
            del self.groups[place]
        return dropped

    def forget(self, step: int) -> None:
        """Forget the groups of a step that is done."""
        for place in [place for place in self.groups if place[0] == step]:
            del self.groups[place]
