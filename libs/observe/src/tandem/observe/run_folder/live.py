"""``live.json``: the current status of a run, in its folder, for observers."""

from __future__ import annotations

from pathlib import Path

import msgspec

LIVE_NAME = "live.json"
LEAVING = "leaving"
"""Status of a draining engine."""


class LiveEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    name: str
    status: str
    version: int
    """Version that it holds or is being refitted to; -1 if its weights are partial."""
    outstanding_tokens: int
    """Tokens that it keeps, or may have to keep, for steps to come."""
    in_flight: int
    """Number of groups that it is generating."""
    host: str
    device: str


class LiveTrainer(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer rank."""

    name: str
    status: str
    version: int
    doing: str
    """Activity that it last reported."""
    host: str
    device: str


class LiveGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout groups by state."""

    waiting: int = 0
    in_flight: int = 0
    ready: int = 0
    taken: int = 0
    dropped: int = 0
    """Number of groups dropped since the last start, because they were too old or were generated again."""


class LiveBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that are ready for training."""

    size: int = 0
    by_age: dict[str, int] = {}
    """Number of groups by how many versions their oldest weights are behind the newest."""


class LiveVersions(msgspec.Struct, frozen=True, kw_only=True):
    """Weight versions."""

    trained: int
    published: int
    verified: int


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a run."""

    at: float
    """Unix time of the status."""
    step: int
    num_steps: int
    phase: str
    eta_s: float | None = None
    elapsed_s: float = 0.0
    groups: LiveGroups = LiveGroups()
    buffer: LiveBuffer = LiveBuffer()
    engines: tuple[LiveEngine, ...] = ()
    trainers: tuple[LiveTrainer, ...] = ()
    versions: LiveVersions | None = None
    failures: int = 0
    """Number of samples on which an environment failed."""
    notes: tuple[str, ...] = ()
    """Newest lines of the console."""


def read_live(folder: Path) -> RunStatus | None:
    """Return the last status from the coordinator of the run in a folder; None if there is no readable one."""
    try:
        return msgspec.json.decode((folder / LIVE_NAME).read_bytes(), type=RunStatus)
    except (OSError, msgspec.MsgspecError):
        return None
