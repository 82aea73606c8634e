"""The table of engines: how far each is from serving tokens, and which weight version it holds.

ABSENT ─▶ JOINED ─▶ BUILDING ─▶ INSTALLING ─▶ CONNECTING ─▶ READY ─▶ REFITTING ─▶ HOLDING(version)
                                                  ▲                     ▲            │
                                                  │                     └─ a newer version
                                                  └── its refit failed, or its digests differ ──┘
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

from tandem.coordinator.scheduler.agenda import Changed, RuleTables


class EngineStatus(enum.Enum):
    """How far an engine is from serving tokens."""

    ABSENT = "waiting for a replacement"
    JOINED = "waiting to be built"
    BUILDING = "building"
    INSTALLING = "installing its transfer program"
    CONNECTING = "waiting for its transfer group to be connected"
    READY = "ready for a version"
    REFITTING = "refitting"
    HOLDING = "holding a version"

    __hash__ = object.__hash__  # as members are equal, but in C: each event asks tables for a status


COMING_BACK = (
    EngineStatus.ABSENT,
    EngineStatus.JOINED,
    EngineStatus.BUILDING,
    EngineStatus.INSTALLING,
    EngineStatus.CONNECTING,
)
"""The statuses of a lost or invalidated engine, before it can be refitted."""


class EngineState:
    """The state of one engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = EngineStatus.READY
        self.version = -1
        """The version it holds, or is being refitted to; -1 if it holds no whole version."""
        self.is_verified = False
        """Whether the version is verified: its digests were equal to the trainers'."""
        self.has_frozen = False
        """Whether it has the weights that never change, which came with an earlier version."""
        self.awaited: set[int] = set()
        """Requests that must be answered before its status changes."""
        self.num_failures = 0
        """Failed attempts to bring it to the current version."""
        self.replace_by = 0.0
        """The time by which an absent engine must be replaced."""
        self.is_awaited_by_hand = False
        """Whether the replacement of an absent engine is to be started by hand."""
        self.leave_by: float | None = None
        """The time by which a draining engine must have left; None if it is not draining. It gets no more groups."""
        self.is_vacant = False
        """Whether it has left as the last engine. Its place is kept until another engine joins."""


class EngineTable(dict[str, EngineState]):
    """The engines of the run by name, in the order of their index: which there are, and how far each is."""

    def __init__(self, departed: Iterable[str], changes: Callable[[RuleTables], Changed]) -> None:
        """Begin without any. Take the engines that left earlier, and `RuleAgenda.changes`."""
        super().__init__()
        self._changed = changes(RuleTables.ENGINES)
        """To be called when an engine is another."""
        self._changed_leaving = changes(RuleTables.LEAVING)
        self._changed_invalidated = changes(RuleTables.INVALIDATED)
        self._by_status: dict[EngineStatus, dict[str, None]] = {status: {} for status in EngineStatus}
        self.num_verified = 0
        """The number of engines with a verified version."""
        self.invalidated: list[str] = []
        """The engines with samples that no longer count. The reader empties it."""
        self.draining: dict[str, None] = {}
        """The draining engines, and the vacant place if there is one."""
        self.departed = {*departed}
        """The engines that have left and were not replaced."""

    @property
    def are_any_unverified(self) -> bool:
        """Whether an engine holds a version that is not verified."""
        return self.num_verified != len(self._by_status[EngineStatus.HOLDING])

    def having(self, *statuses: EngineStatus) -> list[str]:
        """Return the engines that have one of these statuses, in the order of their index."""
        if self.num_having(*statuses) == 0:
            return []
        return [name for name, engine in self.items() if engine.status in statuses]

    def num_having(self, *statuses: EngineStatus) -> int:
        """Return how many engines have one of these statuses."""
        num = 0
        for status in statuses:  # each event asks this several times
            num += len(self._by_status[status])
        return num

    def staying(self) -> list[str]:
        """Return the engines that are not draining, in the order of their index."""
        return [name for name in self if name not in self.draining]

    # --- status ------------------------------------------------------------------------------------------------------

    def move(self, engine: EngineState, status: EngineStatus, *, version: int | None = None) -> None:
        """Set an engine's status, and its version if one is given. The version is not verified yet."""
        del self._by_status[engine.status][engine.name]
        engine.status = status
        self._by_status[status][engine.name] = None
        if version is not None:
            engine.version = version
        self.verify(engine, is_verified=False)

    def verify(self, engine: EngineState, *, is_verified: bool) -> None:
        """Note whether the version that an engine holds is verified."""
        self.num_verified += is_verified - engine.is_verified
        engine.is_verified = is_verified
        self._changed()

    # --- samples that no longer count --------------------------------------------------------------------------------

    def invalidate(self, name: str) -> None:
        """Note that an engine's samples no longer count, because it did not hold the right weights."""
        self.invalidated.append(name)
        self._changed_invalidated()

    def trust(self, name: str) -> None:
        """Note that none of an engine's samples are left to discard."""
        self.invalidated = [invalidate for invalidate in self.invalidated if invalidate != name]
        self._changed_invalidated()

    # --- engines that come -------------------------------------------------------------------------------------------

    def fill(self, names: Iterable[str]) -> None:
        """Enter the engines of the run, each ready for a version."""
        engines = {name: EngineState(name) for name in names}
        self.clear()
        self.update(engines)
        self.departed.difference_update(self)
        self._by_status = {status: {} for status in EngineStatus}
        self._by_status[EngineStatus.READY] = dict.fromkeys(self)
        self.draining = {}
        self.num_verified = 0
        self._changed()
        self._changed_leaving()

    def add(self, name: str) -> None:
        """Enter one more engine, which may have to be connected, or fill a vacant place."""
        if name in self:
            self.remove(name)
        self.departed.discard(name)
        engines = {**self, name: EngineState(name)}
        self.clear()
        self.update((each, engines[each]) for each in sorted(engines, key=lambda n: int(n.rpartition("-")[2])))
        self[name].status = EngineStatus.CONNECTING
        self._by_status[EngineStatus.CONNECTING][name] = None
        self._changed()
        self._changed_leaving()

    def await_by_hand(self, name: str) -> None:
        """Note that no process is launched in the place of a lost engine."""
        engine = self.get(name)
        if engine is not None and engine.status is EngineStatus.ABSENT:
            engine.is_awaited_by_hand = True

    # --- engines that leave ------------------------------------------------------------------------------------------

    def begin_to_leave(self, engine: EngineState, leave_by: float) -> None:
        """Note that an engine is draining."""
        engine.leave_by = leave_by
        self.draining[engine.name] = None
        self._changed()
        self._changed_leaving()

    def stay(self, engine: EngineState) -> None:
        """Note that the process in the place of an engine is not draining."""
        engine.leave_by = None
        self.draining.pop(engine.name, None)
        self._changed()
        self._changed_leaving()

    def leave_vacant(self, engine: EngineState) -> None:
        """Keep the place of an engine that has left."""
        self.begin_to_leave(engine, engine.replace_by)
        engine.is_vacant = True
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
