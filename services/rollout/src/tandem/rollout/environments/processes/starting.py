"""Messages about a reward worker's start: class imported, worker forked, environment made."""

from __future__ import annotations

import msgspec

from tandem.common.messages import EngineServer
from tandem.rollout.environments.environment import RunsIn


class ClassImported(msgspec.Struct, frozen=True):
    """The report that the forking process has imported the environment's class."""

    runs_in: RunsIn = "processes"
    error: str = ""
    """Why the import failed."""


class WorkerStart(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    engine: EngineServer | None = None
    """Address of the rollout's own engine."""


class WorkerForked(msgspec.Struct, frozen=True):
    """The first report of a worker: it is there."""

    pid: int
    guardian: int
    """Process id of its guardian."""


class WorkerReady(msgspec.Struct, frozen=True):
    """The report that a worker has its environment."""

    is_multi_turn: bool = False
    is_async: bool = False
    batch_size: int = 0
    """Calls that it scores at once; 0 if it scores each by itself."""
    error: str = ""
    """Why it has no environment."""
