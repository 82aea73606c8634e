"""The time by which a run must have saved: an observer asks for its end when no further step fits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from tandem.common.messages import AnyCommand, CheckpointSaved, Failed, Reply, SaveCheckpoint
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
from tandem.observe.run_folder.journal import StepRecord

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
