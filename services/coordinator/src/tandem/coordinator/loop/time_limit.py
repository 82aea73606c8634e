"""The time by which a run must have saved, and the decision when to end for it."""

from __future__ import annotations

from collections import deque

_RECENT = 5
"""Number of recent steps from which the next one's duration is estimated."""


def seconds_of(duration: str) -> int:
    """Return the seconds of ``days:hours:minutes:seconds``."""
    days, hours, minutes, seconds = map(int, duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class TimeLimit:
    """A limit that knows how long steps and checkpoints take, and thus when no further step fits.

    A run ends between two steps if it can: then no work is lost. Only a step that takes longer than those before is
    abandoned.
    """

    def __init__(self, must_save_by: str, began_at: float) -> None:
        """`began_at` is by the monotonic clock, as all times are."""
        self._duration = must_save_by
        self._ends_at = began_at + seconds_of(must_save_by)
        self._step_began_at = began_at
        self._steps_s: deque[float] = deque(maxlen=_RECENT)
        self._copied_at: float | None = None
        self._saving_s = 0.0
        self._is_between = False
        self._is_over = False
        self.has_ended_run = False
        """Whether the limit has ended the run, without another request to end it."""

    def copied(self, now: float) -> None:
        """Note that a checkpoint has begun."""
        if self._copied_at is None:
            self._copied_at = now

    def published(self, now: float) -> None:
        """Note that the checkpoint is complete."""
        if self._copied_at is not None:
            self._saving_s = max(self._saving_s, now - self._copied_at)
            self._copied_at = None

    def committed(self, now: float) -> None:
        """Note that a step is done."""
        self._steps_s.append(now - self._step_began_at)
        self._step_began_at = now
        self._is_between = True

    def give_up(self) -> None:
        """Do not end the run: another request already has, and a second one would end it at once."""
        self._is_over = True
        self.has_ended_run = False

    def why_over(self, now: float) -> str | None:
        """Return, once, why the run is to save and end now; None if it may go on."""
        is_between, self._is_between = self._is_between, False
        needed = self._saving_s + (max(self._steps_s) if is_between else 0.0)
        if self._is_over or not self._steps_s or now + needed < self._ends_at:
            return None  # before the first step is done there is nothing to save
        self._is_over = self.has_ended_run = True
        what = (
            f"{self._ends_at - now:.0f} s are left, a step and a checkpoint have taken {needed:.0f} s"
            if is_between
            else "the step has taken longer than those before"
        )
        return f"checkpointing.checkpoint_must_save_by is {self._duration}, and {what}: saving, and ending"
