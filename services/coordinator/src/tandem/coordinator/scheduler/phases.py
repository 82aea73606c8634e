"""Phases of a run, for people to read: their names, and how long a step spends in each.

A phase is derived from the scheduler's tables after every event. It drives nothing.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """What the run as a whole, or one request, is about; the value completes "while ..."."""

    JOINING = "joining"
    BUILDING = "building"
    PLANNING = "planning transfers"
    INSTALLING = "installing transfer programs"
    CONNECTING = "connecting meshes"
    COPYING = "copying weights for engines"
    REFITTING = "refitting"
    ATTESTING = "attesting a weight version"
    GENERATING = "generating"
    TRAINING = "training"
    VALIDATING = "validating"
    SAVING = "saving a checkpoint"
    WRITING = "writing a checkpoint"
    RECORDING = "recording samples"
    FINISHED = "finished"

    __hash__ = object.__hash__  # as members are equal, and in C: tables are asked for a phase at every event


GENERATION = (Phase.GENERATING, Phase.VALIDATING)
"""What engines are asked to generate for."""
_BREAKDOWN: dict[Phase, str] = {
    Phase.GENERATING: "generation",
    Phase.TRAINING: "training",
    Phase.REFITTING: "refit",
    Phase.VALIDATING: "validation",
    Phase.SAVING: "checkpointing",
}
"""Phases that a step's time is divided into; the trainer's own breakdown of training comes with `Trained`."""


class Stopwatch:
    """The phase a run is in, and the seconds that the step in progress has spent in each."""

    def __init__(self, now: float) -> None:
        self.phase = Phase.JOINING
        self._phase_since = self._step_since = now
        self._seconds: dict[str, float] = {}

    def enter(self, phase: Phase, now: float) -> None:
        """Leave the phase for another, or stay in it."""
        if phase is not self.phase:
            self._note(now)
            self.phase = phase

    def begin_step(self, now: float) -> None:
        """Count from here on; what the phase has taken so far is no part of the step."""
        self._note(now)
        self._step_since = now
        self._seconds = {}

    def in_phase(self, now: float) -> float:
        """Return for how long the phase has gone on, or since it was last read off."""
        return now - self._phase_since

    def read(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase of the step, and in ``total`` of all of it."""
        self._note(now)
        return {**self._seconds, "total": now - self._step_since}

    def _note(self, now: float) -> None:
        """Add the time since the phase began to the step's, once."""
        name = _BREAKDOWN.get(self.phase)
        if name is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._phase_since
        self._phase_since = now
