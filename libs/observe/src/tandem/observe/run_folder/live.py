"""The status of a live run, for observers: ``live.json``, and ``external_requests.json``."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tandem.common.files import replace_file
from tandem.common.messages import EngineServer
from tandem.observe.run_folder.journal_file import is_taken

LIVE_NAME = "live.json"
LEAVING = "leaving"
"""Status of a draining engine."""
FILE_NAME = "external_requests.json"


class EngineServersFile:
    """The writer of the file, which exists while a rollout answers. It has secrets, so only its user may read it."""

    def __init__(self, folder: Path) -> None:
        """Discard earlier content."""
        self._path = folder / FILE_NAME
        self._servers: dict[str, EngineServer] = {}
        self._write()

    def open(self, process: str, server: EngineServer) -> None:
        """Add a rollout that answers."""
        self._servers[process] = server
        self._write()

    def close(self, process: str) -> None:
        """Remove a rollout."""
        if self._servers.pop(process, None) is not None:
            self._write()

    def end(self) -> None:
        """Remove all rollouts."""
        self._servers.clear()
        self._write()

    def _write(self) -> None:
        """Write the whole file; errors of the disk never stop the run."""
        with contextlib.suppress(OSError):
            if not self._servers:
                self._path.unlink(missing_ok=True)
                return
            replace_file(self._path, msgspec.json.encode(self._servers), is_private=True)


def read_engine_servers(folder: Path) -> dict[str, EngineServer] | None:
    """Return the servers of the rollouts of the run in a folder, by name; None if no run is live there."""
    if not is_taken(folder):
        return None
    try:
        return msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=dict[str, EngineServer])
    except (OSError, msgspec.MsgspecError):
        return {}


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
