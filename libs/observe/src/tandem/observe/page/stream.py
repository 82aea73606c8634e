"""Changes of runs as server-sent events; files are checked twice a second while there are listeners."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from tandem.common.errors import RunFolderError
from tandem.observe.page.reader import RecordMark, RunReader
from tandem.observe.run_folder.journal_file import JOURNAL_NAME
from tandem.observe.run_folder.live import LIVE_NAME

_LOOK_S = 0.5
"""Interval of the checks, and so the shortest interval of events about a run."""
_ALIVE_S = 15.0
"""Silence after which listeners get a comment, because proxies would close the connection."""


class RunsWatch:
    """A watch of the runs for all listeners."""

    def __init__(self, readers: Sequence[RunReader]) -> None:
        self._readers = readers
        self._has_ended = False

    def end(self) -> None:
        """End all streams, which otherwise only the listeners can."""
        self._has_ended = True

    async def changes(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the extent of each run's record, and again whenever it grows, until the listener leaves.

        When the program is to end, it checks once more, because the run's end may be the reason.
        """
        seen: list[tuple[object, RecordMark | None]] = [(None, None)] * len(self._readers)
        silent_s = 0.0
        while not await request.is_disconnected():
            is_last = self._has_ended
            silent_s += _LOOK_S
            for index, reader in enumerate(self._readers):
                before, sent_mark = seen[index]
                now, mark = await run_in_threadpool(_look, reader, before, sent_mark)
                seen[index] = now, mark
                if mark is not None and mark != sent_mark:
                    silent_s = 0.0
                    yield _event(index, mark)
            if silent_s > _ALIVE_S:
                silent_s = 0.0
                yield b": nothing new\n\n"
            if is_last:
                return
            await asyncio.sleep(_LOOK_S)


def _look(reader: RunReader, before: object, sent_mark: RecordMark | None) -> tuple[object, RecordMark | None]:
    """Return the state of the files, and the extent of the record; the journal is opened only if files have changed."""
    now = _files(reader)
    if now == before:
        return before, sent_mark
    try:
        return now, reader.mark()
    except RunFolderError:  # the folder is being moved away, or created
        return None, sent_mark


def _files(reader: RunReader) -> object:
    states: list[tuple[int, int, int] | None] = []
    for name in (JOURNAL_NAME, LIVE_NAME):
        try:
            status = os.stat(reader.folder / name)
            states.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            states.append(None)
    return states


def _event(index: int, mark: RecordMark) -> bytes:
    content = {"run": index} | msgspec.to_builtins(mark)
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
