"""Warnings, from the metrics of a run's steps, that it learns nothing; pure, without clock or sockets.

`tandem.observe.diagnosis` checks the same conditions, and more, in a run that is over.

A condition that holds for several steps in a row is reported once, with evidence and the configuration keys to look at.
It is reported again only if it has cleared in between. If one condition explains another, only the first is reported.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping

import msgspec

from tandem.common.numeric import ROUNDING

NUM_STEPS = 5
"""Consecutive steps for which a condition must hold."""

Metrics = Mapping[str, float]


class HealthCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A sign that a run learns nothing: a metric that equals something, or is below or above it."""

    metric: str
    """Metric that shows it; steps without it, or without another metric that the condition names, are ignored."""
    equals: float | str | None = None
    """A number, or the name of another metric; equal but for rounding."""
    below: float | None = None
    above: float | None = None
    unless_zero: str = ""
    """Metric without which, in a step where it is 0, the condition says nothing."""
    evidence: str
    """Text of the evidence, with names of metrics in braces."""
    look_at: str
    """Configuration keys to look at."""
    explains: tuple[str, ...] = ()
    """Metrics with conditions that are consequences of this one."""

    @property
    def needed(self) -> frozenset[str]:
        """The metrics without which a step is ignored."""
        named = {name for _, name, _, _ in string.Formatter().parse(self.evidence) if name}
        return frozenset({self.metric, *named, *([self.equals] if isinstance(self.equals, str) else [])})

    def holds(self, metrics: Metrics) -> bool:
        """Tell whether it holds in a step with these metrics."""
        value = metrics[self.metric]
        if self.unless_zero and metrics.get(self.unless_zero) == 0:
            return False
        if self.below is not None:
            return value < self.below
        if self.above is not None:
            return not value <= self.above
        assert self.equals is not None, "a condition equals something, or is below or above it"
        equal = metrics[self.equals] if isinstance(self.equals, str) else self.equals
        return math.isclose(value, equal, rel_tol=ROUNDING)


class RunHealth:
    """The conditions of one run, and the number of steps that each has held."""

    def __init__(self, conditions: Iterable[HealthCondition]) -> None:
        """Watch these conditions (`tandem.observe.health_conditions`)."""
        self._conditions = tuple(conditions)
        self._needed = tuple(condition.needed for condition in self._conditions)
        self._num_steps = [0] * len(self._conditions)
        self._is_said = [False] * len(self._conditions)

    def warnings(self, metrics: Metrics) -> list[str]:
        """Note the metrics of a finished step; return the new warnings."""
        lines: list[str] = []
        explained: set[str] = set()
        for index, condition in enumerate(self._conditions):
            if not self._needed[index] <= metrics.keys():
                continue
            if not condition.holds(metrics):
                self._num_steps[index], self._is_said[index] = 0, False
                continue
            self._num_steps[index] += 1
            if self._num_steps[index] < NUM_STEPS:
                continue
            if condition.metric not in explained and not self._is_said[index]:
                self._is_said[index] = True
                evidence = condition.evidence.format_map(metrics)
                lines.append(f"warning: for {self._num_steps[index]} steps {evidence}; look at {condition.look_at}")
            explained.update(condition.explains)
        return lines
