"""The table of kept groups: what had been generated for the steps to come when the run was interrupted.

A kept group is trained on again as it is, without generating it, as long as the weights that made it are those that the
run has. They are while every step since the checkpoint trains on what it had trained on before. Once a group of a step
is generated again, its weights may be others: then what was made with them, or with later ones, is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.coordinator.scheduler.events import KeptGroup, Place
from tandem.coordinator.scheduler.groups.table import Group


class RestoredGroups:
    """The groups that are kept, until their step has trained."""

    def __init__(self, groups: Mapping[Place, KeptGroup]) -> None:
        self._groups = dict(groups)
        self._restored: set[int] = set()
        """The orders that groups were taken from disk with."""

    def has(self, group: Group) -> bool:
        """Tell whether a group need not be generated."""
        return group.purpose == "train" and (group.step, group.number) in self._groups

    def is_restored(self, request: int) -> bool:
        """Tell whether an order is one to take groups from disk."""
        return request in self._restored

    def files(self, groups: Sequence[Group], request: int) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return where these groups lie, which are taken from there with an order."""
        self._restored.add(request)
        found: dict[str, list[tuple[int, int]]] = {}
        for group in groups:
            kept = self._groups[group.step, group.number]
            found.setdefault(kept.file, []).append((kept.command_id, group.number))
        return {file: tuple(keys) for file, keys in found.items()}

    def lose(self, groups: Sequence[Group]) -> None:
        """Take note that groups cannot be read."""
        for group in groups:
            self._groups.pop((group.step, group.number), None)

    def drop_from(self, version: int) -> set[Place]:
        """Take note that this version of the weights, and later ones, are others than they were; return what went."""
        dropped = {place for place, kept in self._groups.items() if kept.newest_version >= version}
        for place in dropped:
            del self._groups[place]
        return dropped

    def forget(self, step: int) -> None:
        """Take note that a step is done."""
        for place in [place for place in self._groups if place[0] == step]:
            del self._groups[place]
