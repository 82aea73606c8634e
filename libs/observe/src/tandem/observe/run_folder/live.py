"""``live.json``: how a run stands now, in its folder, for whoever looks at it from outside."""

from __future__ import annotations

from pathlib import Path

import msgspec

LIVE_NAME = "live.json"
LEAVING = "leaving"
"""The status of an engine that was told to."""


class LiveEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    name: str
    status: str
    version: int
    """What it holds, or is being refitted to; -1 if that is nothing whole."""
    outstanding_tokens: int
    """That it keeps for steps to come, or may have to."""
    in_flight: int
    """Groups that it is generating."""
    host: str
    device: str


class LiveTrainer(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer rank."""

    name: str
    status: str
    version: int
    doing: str
    """What it said last."""
    host: str
    device: str


class LiveGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout groups by state."""

    waiting: int = 0
    in_flight: int = 0
    ready: int = 0
    taken: int = 0
    dropped: int = 0
    """Since the run began, or was resumed: what made them was too old, or they were made again."""


class LiveBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that are ready to be trained on."""

    size: int = 0
    by_age: dict[str, int] = {}
    """By how many versions their oldest weights are behind the newest."""


class LiveVersions(msgspec.Struct, frozen=True, kw_only=True):
    """Weight versions."""

    trained: int
    published: int
    attested: int


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands."""

    at: float
    """Unix time at which it was so."""
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
    """Samples on which an environment failed."""
    notes: tuple[str, ...] = ()
    """The newest lines of the console."""


def read_live(folder: Path) -> Live | None:
    """Return what the coordinator of the run in a folder said last; None if that is nothing that can be read."""
    try:
        return msgspec.json.decode((folder / LIVE_NAME).read_bytes(), type=Live)
    except (OSError, msgspec.MsgspecError):
        return None
