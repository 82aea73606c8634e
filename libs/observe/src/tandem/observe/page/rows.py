"""The rows of runs that generate no samples, which a process of another module reads for the page."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from tandem.common.errors import SamplesError
from tandem.observe.page.worker import PageWorker
from tandem.observe.shown_rows import MODULE, RowsAnswer, RowsRequest, RunRows

_MOST_BYTES = 1 << 26
_DEADLINE_S = 300.0
"""Seconds for an answer, the start of the process and the reading of the data included."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""The page asks no other host, so data of a hub is that of its cache."""


class PageRows:
    """The rows of runs, by one process, of the run that was last asked for. Threads may share it."""

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        """Start nothing yet."""
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._run = Path()
        self._worker: PageWorker | None = None

    def of(self, run: Path, request: RowsRequest) -> RunRows:
        """Return rows of a run. Raises `SamplesError` with the reason if it has none, or reading them fails."""
        if not self._lock.acquire(timeout=2 * self._deadline_s):
            raise SamplesError("other rows take too long: ask again later")
        try:
            if self._worker is None or self._run != run:
                self._end()
                self._run, self._worker = run, PageWorker([MODULE, str(run)], _MOST_BYTES, _OFFLINE)
            data = self._worker.ask(msgspec.json.encode(request), time.monotonic() + self._deadline_s)
        finally:
            self._lock.release()
        if data is None:
            raise SamplesError(
                f"the rows of {run} cannot be shown: reading them failed, or took longer than {self._deadline_s:g} s; "
                "`coordinator samples` says why"
            )
        answer = msgspec.json.decode(data, type=RowsAnswer)
        if answer.rows is None:
            raise SamplesError(answer.error)
        return answer.rows

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None
