"""Write the policy's log-probabilities of a step's tokens to the record, on a thread beside training.

The service adds those of a step that has trained, and waits for nothing. The thread gets them from the device and
writes them. A disk that is slow or full stops nothing: what is missing is said once.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.samples.batch import Float32s, Int32s
from tandem.samples.sample_record import write_logprobs

_MOST_WAITING = 4
"""Steps that may wait for the disk; of those that come meanwhile nothing is written."""
_CLOSE_S = 3.0
"""How long what still waits may take when the service ends."""


class _Step(NamedTuple):
    """What is to be written of a step."""

    step: int
    keys: Sequence[tuple[int, int, int]]
    """Group, sample and branch of each sequence."""
    lengths_S: Int32s
    logprobs: Callable[[], Float32s]


class LogprobRecorder:
    """The record of one trainer's log-probabilities."""

    def __init__(self, folder: Path, run_id: str, trainer: str) -> None:
        """`folder` is that of the record of samples."""
        self._folder = folder
        self._run_id = run_id
        self._trainer = trainer
        self._queue: queue.Queue[_Step | None] = queue.Queue(_MOST_WAITING)
        self._has_complained = False
        self._thread = threading.Thread(target=self._write, name="record of log-probabilities", daemon=True)
        self._thread.start()

    def add(
        self, step: int, keys: Sequence[tuple[int, int, int]], lengths_S: Int32s, logprobs: Callable[[], Float32s]
    ) -> None:
        """Have what `logprobs` returns written, end to end for these samples; it is called by the thread."""
        try:
            self._queue.put_nowait(_Step(step, keys, lengths_S, logprobs))
        except queue.Full:
            self._complain("the disk is slower than steps are trained")

    def close(self) -> None:
        """Write what still waits, and end the thread."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return  # the thread is held up by the disk; it ends with the process
        self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                logprobs_T = item.logprobs()
                write_logprobs(
                    self._folder, self._run_id, item.step, self._trainer, item.keys, item.lengths_S, logprobs_T
                )
            except OSError as error:
                self._complain(error.strerror or str(error))
            except Exception as error:
                self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, why: str) -> None:
        """Say once that not everything is recorded."""
        if not self._has_complained:
            self._has_complained = True
            line = f"{self._trainer}: log-probabilities are missing in the record {self._folder}: {why}"
            print(line, file=sys.stderr, flush=True)
