"""The idle time of engines and trainers in a step, where they may overlap."""

from __future__ import annotations


class StepIdleness:
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
