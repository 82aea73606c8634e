"""Observers of finished steps that every run has: warnings about its health, and its curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.config import Config
from tandem.coordinator.observers.observer import ReportingObserver
from tandem.observe.health import LowStart, RunHealth, conditions
from tandem.observe.run_folder.curves import CurvesFile
from tandem.observe.run_folder.journal import StepRecord


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

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
