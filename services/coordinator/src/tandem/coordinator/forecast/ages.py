"""Predicted seconds of a step by the age of samples, from the rates of synchronous training; pure.

A synchronous step takes G seconds of generation (from the first prompt to the last sample), T of training and R of
refit. The verification of the engines' weights takes A, beside the next generation.

    period(0) = max(G, A) + T + R

Within G, engines do W seconds of work with all of their places taken; the rest is waiting for the longest responses.
Let w samples share a place (w >= 1), and let the longest response be r times as long as the mean.

    W = G w / (w + x + (r - 1 - x) / w),    x = min(r - 1, r (0.8 - r / (4 r - 2))).

If all begin at once (w = 1), the places wait r - 1 mean lengths on average. If many have gone before, each place is
somewhere within its last response. With lengths as below, r r / (4 r - 2) are left of these on average, and about 0.8 r
of the one that ends last.

Let lengths be distributed like powers of a uniform variable. Then this fraction of a step's tokens is generated t
seconds after its generation began, where q = G / W - 1 and s = t / G.

    made(t) = (1 + q) s - q s ^ (1 + 1 / q).

With an age of k, a step's prompts are drawn k steps before it is in progress, as soon as engines are refitted. From
then on, the step takes at least as long as it would alone. It takes longer if engines must first finish earlier draws,
and k refits interrupt them meanwhile. The period is thus the slowest of three cycles.

    period(k) = max(engines, trainers, latency)

- engines: W + R if weights are updated in flight, since a refit alone interrupts engines.
- engines: G + R if they are not, since each version waits until engines have nothing in flight.
- trainers: T + R + A, since trainers step again once engines have their weights, and they their digests.
- latency: (G + B + T) / (k + 1) + R.

B is the rest of the k steps before, drawn P = period(k) seconds apart.

    B = W (1 - made(P - R)) + W (1 - made(2 (P - R))) + ...

The latency is why an age of k makes training at most k + 1 times as fast, whatever the rates. The model leaves out that
steps differ, that concurrent work slows down, validation, and checkpoints. Without updates in flight it is cautious: of
several engines, those without long responses go on before the others.

The age of the weights that generate a token follows, in flight, from when it is generated. A step's generation begins B
after its draw, or, if engines are the limit, so late that it ends just in time. Weights become one step younger after
each period. If engines and trainers take nearly as long, chance decides how far engines run ahead. Not in flight, a
sample keeps the weights that it began with.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import msgspec

_EVEN = 0.01
"""Unevenness of lengths below which they count as equal."""
_HALVINGS = 60
"""Halvings of the interval that holds the period."""

Limit = Literal["nothing overlaps", "engines", "trainers", "latency"]


class StepRates(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a synchronous step, and how evenly its engines are used."""

    generation_s: float
    training_s: float
    """Training, with the log-probabilities before it."""
    refit_s: float = 0.0
    verify_s: float = 0.0
    """Seconds from the refit until digests agree."""
    longest_over_mean: float = 1.0
    """A step's longest response as a multiple of the mean."""
    samples_per_place: float = 1.0
    """A step's samples as a multiple of what engines run at once.

    Less than one counts as one: the engines' speed with more to do than they ever had is unknown.
    """

    @property
    def work_s(self) -> float:
        """Seconds of generation if no engine waited for the longest responses: W."""
        waves, longest = max(1.0, self.samples_per_place), self.longest_over_mean
        at_once = longest - 1.0
        after_many = min(at_once, longest * (0.8 - longest / (4.0 * longest - 2.0)))
        return self.generation_s * waves / (waves + after_many + (at_once - after_many) / waves)

    def predict_generated(self, seconds: float) -> float:
        """Return the fraction of a step's tokens that is generated `seconds` after its generation began."""
        share = min(max(seconds / self.generation_s, 0.0), 1.0)
        unevenness = self.generation_s / self.work_s - 1.0
        if unevenness < _EVEN:
            return share
        power: float = share ** (1.0 + 1.0 / unevenness)
        return (1.0 + unevenness) * share - unevenness * power

    def predict_backlog_s(self, period_s: float, num_steps: int) -> float:
        """Return the remaining work of engines for earlier steps: B.

        The steps began one period after the other, the last of them one period ago.
        """
        return self.work_s * sum(1.0 - self.predict_generated(step * period_s) for step in range(1, num_steps + 1))


class AgePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The costs and gains of an age."""

    age: int
    period_s: float
    """Seconds of a step."""
    speedup: float
    """Speed as a multiple of synchronous training's."""
    limit: Limit
    """Slowest cycle."""
    share_by_age: tuple[float, ...] | None
    """Fraction of tokens by the age of the weights that generate them: 0 first, `age` last; None if not predicted."""
    engines_idle: float
    """Unused fraction of the engines' capacity."""
    trainers_idle: float
    """Unused fraction of the time."""


def predict(rates: StepRates, age: int, *, in_flight: bool) -> AgePrediction:
    """Predict steps with samples of an age; `in_flight` says whether engines are updated while they generate."""
    synchronous_s = max(rates.generation_s, rates.verify_s) + rates.training_s + rates.refit_s
    period_s, limit = _slowest(rates, age, in_flight) if age else (synchronous_s, "nothing overlaps")
    return AgePrediction(
        age=age,
        period_s=period_s,
        speedup=synchronous_s / period_s,
        limit=limit,
        share_by_age=_share_by_age(rates, age, period_s, limit) if in_flight or age == 0 else None,
        engines_idle=max(0.0, 1.0 - rates.work_s / period_s),
        trainers_idle=max(0.0, 1.0 - rates.training_s / period_s),
    )


def bound_speedup(age: int) -> int:
    """Return the upper bound of the speedup for an age, whatever the rates."""
    return age + 1


def _slowest(rates: StepRates, age: int, in_flight: bool) -> tuple[float, Limit]:
    """Return the period of an age above 0, and its slowest cycle."""

    def cycles(period_s: float) -> dict[Limit, float]:
        generation_s = rates.generation_s + rates.predict_backlog_s(period_s - rates.refit_s, age)
        return {
            "engines": (rates.work_s if in_flight else rates.generation_s) + rates.refit_s,
            "trainers": rates.training_s + rates.refit_s + rates.verify_s,
            "latency": (generation_s + rates.training_s) / (age + 1) + rates.refit_s,
        }

    # A longer period leaves less work of earlier steps: exactly one period is as long as its cycles.
    low_s = max(cycles(math.inf).values())
    high_s = max(cycles(low_s).values())
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if max(cycles(middle_s).values()) > middle_s else (low_s, middle_s)
    cycle_seconds = cycles(high_s)
    return high_s, max(cycle_seconds, key=lambda name: cycle_seconds[name])


def _share_by_age(rates: StepRates, age: int, period_s: float, limit: Limit) -> tuple[float, ...]:
    """Return the fraction of tokens by age, 0 first, with weights updated in flight."""
    between_s = period_s - rates.refit_s
    spare_s = (age + 1) * between_s - rates.training_s - rates.generation_s
    begins_s = spare_s if limit == "engines" else rates.predict_backlog_s(between_s, age)
    generated_shares = [0.0, *(rates.predict_generated((step + 1) * between_s - begins_s) for step in range(age)), 1.0]
    return tuple(after - before for before, after in reversed([*pairwise(generated_shares)]))
