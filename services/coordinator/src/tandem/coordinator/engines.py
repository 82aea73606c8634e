"""What the coordinator knows of each engine's weights, and of the refit in progress. Plain state, no decisions."""

from __future__ import annotations

import enum


class Status(enum.Enum):
    """How far an engine is from serving tokens."""

    ABSENT = "waiting for a replacement"
    BUILDING = "building"
    INSTALLING = "installing its transfer program"
    CONNECTING = "waiting for its mesh to be connected"
    READY = "ready for a version"
    REFITTING = "refitting"
    HOLDING = "holding the version"


ON_THEIR_WAY = {Status.ABSENT, Status.BUILDING, Status.INSTALLING, Status.REFITTING}
"""To where a mesh can be connected again: engines with which all is well, and some that must be refitted."""


class EngineState:
    """What is known of one engine."""

    def __init__(self) -> None:
        self.status = Status.READY
        self.awaited: set[int] = set()
        """Orders that must be answered before its status changes."""
        self.is_attested = False
        self.num_failures = 0
        """To bring it to the current version."""
        self.num_losses = 0
        self.replace_by = 0.0
        """When it must have been replaced; while it is absent."""


class RefitProgress:
    """What a refit has been so far."""

    def __init__(self, *, started_at: float = 0.0, deadline: float = 0.0) -> None:
        self.deadline = deadline
        self.seconds: dict[str, float] = {}
        self.engines: list[str] = []
        self.quarantined: dict[str, str] = {}
        self.num_failures_to_send: dict[str, int] = {}
        self._since = started_at

    def transferred(self, now: float) -> None:
        """Every engine holds the version."""
        self._note("transfer", now)

    def attested(self, now: float) -> None:
        """All digests are here."""
        self._note("attest" if "transfer" in self.seconds else "transfer", now)

    def committed(self, now: float) -> None:
        """The refit service has compared them."""
        self._note("commit", now)

    def _note(self, phase: str, now: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
