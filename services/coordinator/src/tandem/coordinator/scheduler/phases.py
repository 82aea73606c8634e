"""Phases of a run, for people to read: their names, how long a step spends in each, and idle time.

A phase is derived from the scheduler's tables after an event that may have changed it. It decides nothing.
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


class Idleness:
    """Adds up idle time of the step in progress. Its owner says after every event which are idle from then on."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._share_of_engines = 0.0
        self._are_trainers_idle = False
        self._engines_s = 0.0
        self._trainers_s = 0.0

    def note(self, now: float, *, share_of_engines: float, are_trainers_idle: bool) -> None:
        """Take note of the share of engines that have nothing to generate from now on, and of the trainers."""
        self._add(now)
        self._share_of_engines, self._are_trainers_idle = share_of_engines, are_trainers_idle

    def read(self, now: float) -> dict[str, float]:
        """Return the seconds that engines, in the mean, and trainers were idle since this was last asked."""
        self._add(now)
        seconds = {"engine_idle_s": self._engines_s, "trainer_idle_s": self._trainers_s}
        self._engines_s = self._trainers_s = 0.0
        return seconds

    def _add(self, now: float) -> None:
        elapsed, self._since = now - self._since, now
        self._engines_s += elapsed * self._share_of_engines
        self._trainers_s += elapsed * self._are_trainers_idle
