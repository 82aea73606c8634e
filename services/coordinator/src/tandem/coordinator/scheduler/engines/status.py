"""The status of engines: how far each is from serving tokens, and which weight version it holds.

ABSENT ─▶ JOINED ─▶ BUILDING ─▶ INSTALLING ─▶ CONNECTING ─▶ READY ─▶ REFITTING ─▶ HOLDING(version)
                                                  ▲                     ▲            │
                                                  │                     └─ a newer version
                                                  └── its refit failed, or its digests differ ──┘
"""

from __future__ import annotations

import enum

from tandem.coordinator.scheduler.agenda import Changed


class Status(enum.Enum):
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


COMING_BACK = (Status.ABSENT, Status.JOINED, Status.BUILDING, Status.INSTALLING, Status.CONNECTING)
"""The statuses of a lost or invalidated engine, before it can be refitted."""


class Engine:
    """The state of one engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = Status.READY
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


class Engines(dict[str, Engine]):
    """The engines of the run by name, in the order of their index, and by status."""

    def __init__(self, changed: Changed) -> None:
        """Begin without any; `changed` is called when an engine is another."""
        super().__init__()
        self._changed = changed
        self._by_status: dict[Status, dict[str, None]] = {status: {} for status in Status}
        self.draining: dict[str, None] = {}
        """The draining engines, and the vacant place if there is one."""
        self.num_verified = 0
        """The number of engines with a verified version."""

    @property
    def are_any_unverified(self) -> bool:
        """Whether an engine holds a version that is not verified."""
        return self.num_verified != len(self._by_status[Status.HOLDING])

    def staying(self) -> list[str]:
        """Return the others, in the order of their index."""
        return [name for name in self if name not in self.draining]

    def having(self, *statuses: Status) -> list[str]:
        """Return the engines that have one of these statuses, in the order of their index."""
        if self.num_having(*statuses) == 0:
            return []
        return [name for name, engine in self.items() if engine.status in statuses]

    def num_having(self, *statuses: Status) -> int:
        """Return how many engines have one of these statuses."""
        num = 0
        for status in statuses:  # each event asks this several times
            num += len(self._by_status[status])
        return num

    def move(self, engine: Engine, status: Status, *, version: int | None = None) -> None:
        """Set an engine's status, and its version if one is given. The version is not verified yet."""
        del self._by_status[engine.status][engine.name]
        engine.status = status
        self._by_status[status][engine.name] = None
        if version is not None:
            engine.version = version
        self.verify(engine, is_verified=False)

    def verify(self, engine: Engine, *, is_verified: bool) -> None:
        """Note whether the version that an engine holds is verified."""
        self.num_verified += is_verified - engine.is_verified
        engine.is_verified = is_verified
        self._changed()
