"""Phases of a run, for people: their names, the time that a step spends in each, and idle time.

A phase is derived from the scheduler's tables after an event that may have changed it. It decides nothing.
"""

from __future__ import annotations

import enum


class RunPhase(enum.Enum):
    """The phases of the run as a whole, or of one request. The value completes "while ..."."""

    JOINING = "joining"
    BUILDING = "building"
    PLANNING = "planning transfers"
    INSTALLING = "installing transfer programs"
    CONNECTING = "connecting transfer groups"
    COPYING = "copying weights for engines"
    REFITTING = "refitting"
    VERIFYING = "verifying a weight version"
    GENERATING = "generating"
    TRAINING = "training"
    VALIDATING = "validating"
    SAVING = "saving a checkpoint"
    WRITING = "writing a checkpoint"
    RECORDING = "recording samples"
    FINISHED = "finished"

    __hash__ = object.__hash__  # as members are equal, but in C: each event asks tables for a phase


GENERATION = (RunPhase.GENERATING, RunPhase.VALIDATING)
"""The phases in which engines generate."""
_BREAKDOWN: dict[RunPhase, str] = {
    RunPhase.GENERATING: "generation",
    RunPhase.TRAINING: "training",
    RunPhase.REFITTING: "refit",
    RunPhase.VALIDATING: "validation",
    RunPhase.SAVING: "checkpointing",
}
"""The phases that a step's time is divided into. The trainer's own breakdown of training comes with `Trained`."""


class PhaseStopwatch:
    """The phase of a run, and the seconds that the step in progress has spent in each."""

    def __init__(self, now: float) -> None:
        self.phase = RunPhase.JOINING
        self._phase_since = self._step_since = now
        self._seconds: dict[str, float] = {}

    def enter(self, phase: RunPhase, now: float) -> None:
        """Enter another phase, or stay in this one."""
        if phase is not self.phase:
            self._note(now)
            self.phase = phase

    def begin_step(self, now: float) -> None:
        """Count from now on. The time that the phase has taken so far is not part of the step."""
        self._note(now)
        self._step_since = now
        self._seconds = {}

    def measure_phase(self, now: float) -> float:
        """Return the seconds since the phase began or was last read."""
        return now - self._phase_since

    def read(self, now: float) -> dict[str, float]:
        """Return the seconds of the step by phase, with their ``total``."""
        self._note(now)
        return {**self._seconds, "total": now - self._step_since}

    def _note(self, now: float) -> None:
        """Add the time since the phase began to the step's time, once."""
        name = _BREAKDOWN.get(self.phase)
        if name is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._phase_since
        self._phase_since = now
