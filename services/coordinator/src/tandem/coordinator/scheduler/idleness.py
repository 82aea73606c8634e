"""How long engines and trainers have had nothing to do, while the others of them had."""

from __future__ import annotations


class Idleness:
    """Adds up idle time of the step in progress. Its owner says after every event who is idle from then on."""

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
