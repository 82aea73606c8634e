"""Phases of a run, for people: their names, the time that a step spends in each, and idle time.

A phase is derived from the scheduler's tables after an event that may have changed it. It decides nothing.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
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


GENERATION = (Phase.GENERATING, Phase.VALIDATING)
"""The phases in which engines generate."""
_BREAKDOWN: dict[Phase, str] = {
    Phase.GENERATING: "generation",
    Phase.TRAINING: "training",
    Phase.REFITTING: "refit",
    Phase.VALIDATING: "validation",
    Phase.SAVING: "checkpointing",
}
"""The phases that a step's time is divided into. The trainer's own breakdown of training comes with `Trained`."""


class Stopwatch:
    """The phase of a run, and the seconds that the step in progress has spent in each."""

    def __init__(self, now: float) -> None:
        self.phase = Phase.JOINING
        self._phase_since = self._step_since = now
        self._seconds: dict[str, float] = {}

    def enter(self, phase: Phase, now: float) -> None:
        """Enter another phase, or stay in this one."""
        if phase is not self.phase:
            self._note(now)
            self.phase = phase

    def begin_step(self, now: float) -> None:
        """Count from now on. The time that the phase has taken so far is not part of the step."""
        self._note(now)
        self._step_since = now
        self._seconds = {}

    def in_phase(self, now: float) -> float:
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


class Idleness:
    """The idle time of the step in progress. The owner says after each event which processes are idle from then on."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._share_of_engines = 0.0
        self._are_trainers_idle = False
        self._engines_s = 0.0
        self._trainers_s = 0.0

    def note(self, now: float, *, share_of_engines: float, are_trainers_idle: bool) -> None:
        """Note the share of engines that are idle from now on, and whether the trainers are."""
        self._add(now)
        self._share_of_engines, self._are_trainers_idle = share_of_engines, are_trainers_idle

    def read(self, now: float) -> dict[str, float]:
        """Return the idle seconds since the last call: of engines, in the mean, and of trainers."""
        self._add(now)
        seconds = {"engine_idle_s": self._engines_s, "trainer_idle_s": self._trainers_s}
        self._engines_s = self._trainers_s = 0.0
        return seconds

    def _add(self, now: float) -> None:
        elapsed, self._since = now - self._since, now
        self._engines_s += elapsed * self._share_of_engines
        self._trainers_s += elapsed * self._are_trainers_idle
