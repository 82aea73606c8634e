"""Logging of the policy's log-probabilities to the rollout log, on a thread beside training.

The service adds a step that has trained, and waits for nothing. The thread gets the log-probabilities from the device
and writes them. A slow or full disk stops nothing: missing parts are reported once.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.samples.batch import Float32s, Int32s, SampleBatch
from tandem.samples.sample_writing import write_logprobs

_MOST_WAITING = 4
"""Steps that may wait for the disk. Nothing is written for further steps."""
_CLOSE_S = 3.0
"""How long the waiting steps may take when the service ends."""


class _Step(NamedTuple):
    """The part of a step to be written."""

    step: int
    keys: Sequence[tuple[int, int, int]]
    """Group, sample and branch of each sequence."""
    lengths_S: Int32s
    logprobs: Callable[[], Float32s]


class LogprobRecorder:
    """The writer of one trainer's log-probabilities."""

    def __init__(self, folder: Path, run_id: str, trainer: str) -> None:
        """Take the folder of the rollout log, the run's id and the trainer's name."""
        self._folder = folder
        self._run_id = run_id
        self._trainer = trainer
        self._queue: queue.Queue[_Step | None] = queue.Queue(_MOST_WAITING)
        self._has_complained = False
        self._thread = threading.Thread(target=self._write, name="record of log-probabilities", daemon=True)
        self._thread.start()

    def add(self, step: int, samples: SampleBatch, logprobs: Callable[[], Float32s]) -> None:
        """Write the result of `logprobs`, end to end for these sequences. The thread calls it."""
        keys = [*zip(samples.group_S.tolist(), samples.sample_S.tolist(), samples.branch_S.tolist(), strict=True)]
        try:
            self._queue.put_nowait(_Step(step, keys, samples.lengths_S, logprobs))
        except queue.Full:
            self._complain("the disk is slower than steps are trained")

    def close(self) -> None:
        """Write the steps that still wait, and end the thread."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return  # the disk holds up the thread, which ends with the process
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

    def _complain(self, reason: str) -> None:
        """Report once that not everything is logged."""
        if not self._has_complained:
            self._has_complained = True
            line = f"{self._trainer}: log-probabilities are missing in the record {self._folder}: {reason}"
            print(line, file=sys.stderr, flush=True)
