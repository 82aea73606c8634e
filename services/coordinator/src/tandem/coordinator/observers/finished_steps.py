"""Observers of finished steps: they warn, write curves and lines, or ask for the end of the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from tandem.common.messages import AnyCommand, CheckpointSaved, Failed, Reply, SaveCheckpoint
from tandem.config import Config
from tandem.coordinator.observers.observer import Observer, ReportingObserver
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
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


_RECENT = 5
"""Number of recent steps from which the next one's duration is estimated."""


def seconds_of(duration: str) -> int:
    """Return the seconds of ``days:hours:minutes:seconds``."""
    days, hours, minutes, seconds = map(int, duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class TimeLimit(Observer):
    """A limit that knows how long steps and checkpoints take, and thus when no further step fits.

    A run ends between two steps if it can: then no work is lost. Only a step that takes longer than those before is
    abandoned.
    """

    def __init__(
        self, must_save_by: str, ask: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` asks for the end of the run, which begins now, and takes the reason."""
        self._duration = must_save_by
        self._ask = ask
        self._clock = clock
        self._step_began_at = clock()
        self._ends_at = self._step_began_at + seconds_of(must_save_by)
        self._steps_s: deque[float] = deque(maxlen=_RECENT)
        self._saving: tuple[int, float] | None = None
        """Step of the newest checkpoint, and when it was begun."""
        self._saving_s = 0.0
        self._is_between = False
        self._is_over = False

    def sent(self, process: str, command: AnyCommand, now: float) -> None:
        """Note that a checkpoint has begun."""
        if isinstance(command, SaveCheckpoint) and (self._saving is None or self._saving[0] != command.step):
            self._saving = (command.step, now)

    def answered(self, process: str, reply: Reply | Failed, now: float) -> None:
        """Note that a trainer's part of the checkpoint is written; the last part counts."""
        if isinstance(reply, CheckpointSaved) and self._saving is not None:
            self._saving_s = max(self._saving_s, now - self._saving[1])

    def committed(self, record: StepRecord) -> None:
        """Note that a step is done."""
        now = self._clock()
        self._steps_s.append(now - self._step_began_at)
        self._step_began_at = now
        self._is_between = True

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Ask once for the end of the run, if its time is over."""
        if not self._is_over and (reason := self._explain_end(self._clock())) is not None:
            self._is_over = True
            self._ask(reason)

    def _explain_end(self, now: float) -> str | None:
        """Return why the run is to save and end now; None if it may go on."""
        is_between, self._is_between = self._is_between, False
        needed = self._saving_s + (max(self._steps_s) if is_between else 0.0)
        if not self._steps_s or now + needed < self._ends_at:
            return None  # before the first step is done there is nothing to save
        cause = (
            f"{self._ends_at - now:.0f} s are left, a step and a checkpoint have taken {needed:.0f} s"
            if is_between
            else "the step has taken longer than those before"
        )
        return f"checkpointing.checkpoint_must_save_by is {self._duration}, and {cause}: saving, and ending"


class ValidationStop(Observer):
    """A limit that a metric of validation reaches."""

    def __init__(self, metric: str, threshold: float, key: str, ask: Callable[[str], None]) -> None:
        """`ask` asks for the end of the run, and takes the reason; `key` is the metric's key, for that reason."""
        self._metric = metric
        self._threshold = threshold
        self._key = key
        self._ask = ask
        self._why: str | None = None
        self._has_asked = False

    def is_reached(self, records: Sequence[StepRecord]) -> bool:
        """Note, and tell, whether the last of these steps that was validated is good enough."""
        for record in [record for record in records if self._metric in record.metrics][-1:]:
            value = record.metrics[self._metric]
            if value >= self._threshold:
                self._why = (
                    f"{self._key}: step {record.step} has {self._metric} {value:g}, at least {self._threshold:g}: "
                    "the run ends"
                )
        return self._why is not None

    def committed(self, record: StepRecord) -> None:
        """Ask for the end of the run at once, if the step is good enough."""
        self.is_reached([record])
        self._ask_once()

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Ask for the end of a run that was good enough when it was resumed."""
        self._ask_once()

    def _ask_once(self) -> None:
        if self._why is not None and not self._has_asked:
            self._has_asked = True
            self._ask(self._why)


def validation_stop(
    config: Config, earlier: Callable[[], Sequence[StepRecord]], ask: Callable[[str], None]
) -> list[ValidationStop]:
    """Return the observer that a configuration asks for, if it does.

    It looks at the `earlier` steps too: a run that has ended so does not go on when it is resumed, even if it did
    another step before it ended.
    """
    section = config.rollout_section if config.generates else None
    if section is None or section.stop_at_validation_metric is None or section.stop_at_validation_threshold is None:
        return []
    key = f"{config.algorithm}.stop_at_validation_metric"
    stop = ValidationStop(section.stop_at_validation_metric, section.stop_at_validation_threshold, key, ask)
    stop.is_reached(earlier())
    return [stop]
