"""The table of engines, as engines join, leave, and are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem.coordinator.scheduler.agenda import Changed
from tandem.coordinator.scheduler.engines.status import Engine, Engines, Status
from tandem.coordinator.scheduler.rule import Table


class EngineTable(Engines):
    """All engines of the run: which there are, which leave, and whose samples no longer count."""

    def __init__(self, departed: Iterable[str], changes: Callable[[Table], Changed]) -> None:
        """Take the engines that left earlier, and `Agenda.changes`."""
        super().__init__(changes(Table.ENGINES))
        self._changed_leaving = changes(Table.LEAVING)
        self._changed_invalidated = changes(Table.INVALIDATED)
        self.invalidated: list[str] = []
        """The engines with samples that no longer count. The reader empties it."""
        self.departed = {*departed}
        """The engines that have left and were not replaced."""

    def fill(self, names: Iterable[str]) -> None:
        """Enter the engines of the run, each ready for a version."""
        engines = {name: Engine(name) for name in names}
        self.clear()
        self.update(engines)
        self.departed.difference_update(self)
        self._by_status = {status: {} for status in Status}
        self._by_status[Status.READY] = dict.fromkeys(self)
        self.draining = {}
        self.num_verified = 0
        self._changed()
        self._changed_leaving()

    def add(self, name: str) -> None:
        """Enter one more engine, which may have to be connected, or fill a vacant place."""
        if name in self:
            self.remove(name)
        self.departed.discard(name)
        engines = {**self, name: Engine(name)}
        self.clear()
        self.update((each, engines[each]) for each in sorted(engines, key=lambda n: int(n.rpartition("-")[2])))
        self[name].status = Status.CONNECTING
        self._by_status[Status.CONNECTING][name] = None
        self._changed()
        self._changed_leaving()

    def remove(self, name: str) -> None:
        """Remove an engine that has left."""
        engine = self.pop(name)
        self.departed.add(name)
        self.verify(engine, is_verified=False)
        del self._by_status[engine.status][name]
        self.draining.pop(name, None)
        self._changed()
        self._changed_leaving()

    def invalidate(self, name: str) -> None:
        """Note that an engine's samples no longer count, because it did not hold the right weights."""
        self.invalidated.append(name)
        self._changed_invalidated()

    def trust(self, name: str) -> None:
        """Note that none of an engine's samples are left to discard."""
        self.invalidated = [invalidate for invalidate in self.invalidated if invalidate != name]
        self._changed_invalidated()

    def await_by_hand(self, name: str) -> None:
        """Note that no process is launched in the place of a lost engine."""
        engine = self.get(name)
        if engine is not None and engine.status is Status.ABSENT:
            engine.is_awaited_by_hand = True

    def begin_to_leave(self, engine: Engine, leave_by: float) -> None:
        """Note that an engine is draining."""
        engine.leave_by = leave_by
        self.draining[engine.name] = None
        self._changed()
        self._changed_leaving()

    def stay(self, engine: Engine) -> None:
        """Note that the process in the place of an engine is not draining."""
        engine.leave_by = None
        self.draining.pop(engine.name, None)
        self._changed()
        self._changed_leaving()

    def leave_vacant(self, engine: Engine) -> None:
        """Keep the place of an engine that has left."""
        self.begin_to_leave(engine, engine.replace_by)
        engine.is_vacant = True
        self._changed()
        self._changed_leaving()

    def leaving(self) -> list[str]:
        """Return the draining engines, and the vacant place if there is one."""
        return list(self.draining)

    def names(self) -> list[str]:
        """Return all engines, in the order of their index."""
        return list(self)
