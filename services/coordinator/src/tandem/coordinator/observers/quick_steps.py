"""Lines of quick steps: the console has some of them, and a file in the run folder all."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from tandem.coordinator.observers.observer import Reporter
from tandem.observe.lines import step_line
from tandem.observe.run_folder.journal import StepRecord

STEP_EVERY_S = 3.0
"""Shortest time between the lines of two steps on the console of a run that generates nothing."""
STEP_LOG = "logs/steps.log"
"""The file with a line for each step, in the run folder."""


class StepLog(Reporter):
    """The file of a run's steps. A resumed run goes on in it."""

    def __init__(self, folder: Path, last_step: int) -> None:
        super().__init__()
        self._last_step = last_step
        self._gives_up = f"{STEP_LOG} is not written further"
        self._file: TextIO | None = None
        with self.going_on(self._gives_up):
            (folder / STEP_LOG).parent.mkdir(exist_ok=True)
            self._file = (folder / STEP_LOG).open("a", buffering=1, encoding="utf-8")

    def committed(self, record: StepRecord) -> None:
        """Append a step's line."""
        if self._file is not None:
            with self.going_on(self._gives_up):
                self._file.write(f"{step_line(record, self._last_step)}\n")

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
