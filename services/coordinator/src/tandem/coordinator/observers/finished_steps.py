"""Observers of finished steps: warnings about a run's health, its curves, and lines of quick steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tandem.config import Config
from tandem.coordinator.observers.observer import ReportingObserver
from tandem.observe.health import LowStart, RunHealth, conditions
from tandem.observe.lines import step_line
from tandem.observe.run_folder.curves import CurvesFile
from tandem.observe.run_folder.journal import StepRecord

STEP_EVERY_S = 3.0
"""Shortest time between the lines of two steps on the console of a run that generates nothing."""
_NUM_FIRST = 10
"""First steps that have a line each, however quick they are."""
STEP_LOG = "logs/steps.log"
"""The file with a line for each step, in the run folder."""


class QuickSteps:
    """Decides which steps have a line: the first, the last, those validated or saved, and one after a while."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._num_committed = 0
        self._printed_at = -STEP_EVERY_S

    def is_due(self, record: StepRecord, now: float) -> bool:
        """Return whether a step has a line; `now` is the clock's time in seconds."""
        self._num_committed += 1
        is_first, is_last = self._num_committed <= _NUM_FIRST, record.step == self._last_step
        is_validated = any(name.startswith("val_") for name in record.metrics)
        is_late = now - self._printed_at >= STEP_EVERY_S
        if is_due := is_first or is_last or is_validated or bool(record.checkpoint) or is_late:
            self._printed_at = now
        return is_due


class StepLog(ReportingObserver):
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


class HealthWarnings(ReportingObserver):
    """Warnings about a step's metrics."""

    def __init__(self, config: Config, history: Sequence[StepRecord]) -> None:
        super().__init__()
        self._health = RunHealth(conditions(config))
        self._low_start: LowStart | None = None
        if config.declaration.rolls_out and config.rollout_section.val_period > 0:
            self._low_start = LowStart((record.step, record.metrics) for record in history)

    def committed(self, record: StepRecord) -> None:
        """Check a step's metrics."""
        self.news += self._health.warnings(record.metrics)
        if self._low_start is not None and (warning := self._low_start.warning(record.step, record.metrics)):
            self.news.append(warning)


_NO_CURVES = "curves are read from the journal, which takes longer"


class CurveFile(ReportingObserver):
    """The curves in the run folder, a copy of the journal's."""

    def __init__(self, folder: Path, history: Sequence[StepRecord]) -> None:
        super().__init__()
        self._file: CurvesFile | None = None
        with self.going_on(_NO_CURVES):
            self._file = CurvesFile(folder, history)

    def committed(self, record: StepRecord) -> None:
        """Append a step's metrics."""
        if self._file is not None:
            with self.going_on(_NO_CURVES):
                self._file.append(record)

    def amended(self, record: StepRecord) -> None:
        """Write a step's metrics again."""
        if self._file is not None:
            with self.going_on(_NO_CURVES):
                self._file.amend(record)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
