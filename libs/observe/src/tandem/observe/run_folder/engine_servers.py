"""``external_requests.json``: addresses at which the rollouts of a live run answer OpenAI's API."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tandem.common.files import replace_file
from tandem.common.messages import EngineServer
from tandem.observe.run_folder.journal_file import is_taken

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
