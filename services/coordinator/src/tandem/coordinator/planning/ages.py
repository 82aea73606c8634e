"""Predict a step's seconds by the age of samples, from the rates of synchronous training: pure.

Of a synchronous step, generation takes G seconds (from the first prompt to the last sample), training T, the refit R,
and the proof that engines hold what was sent A, beside the next generation::

    period(0) = max(G, A) + T + R

In G, engines do work that takes them W seconds when all of their places are taken; the rest they wait for the longest
responses. Where w samples share a place (w >= 1), and the longest response is r times as long as the mean::

    W = G w / (w + x + (r - 1 - x) / w),    x = min(r - 1, r (0.8 - r / (4 r - 2)))

If all begin at once (w = 1), the places wait r - 1 mean lengths in the mean. If many have gone before, each place is
somewhere within its last response: with lengths as below, r r / (4 r - 2) are left of these in the mean, and of the one
that ends last about 0.8 r.

t seconds after generation began, this share of a step's tokens is made, if lengths are spread like powers of what is
evenly spread, where q = G / W - 1 and s = t / G::

    made(t) = (1 + q) s - q s ^ (1 + 1 / q)

With an age of k, the prompts of a step are drawn k steps before it is the one in progress, as soon as engines have been
refitted. The step cannot end sooner after that than it would alone, or where engines have yet to finish what was drawn
before, and k refits hold them up meanwhile. So what remains is the slowest of three cycles::

    period(k) = max( engines   W + R where weights are updated in flight (a refit holds engines up, and nothing else),
                               G + R where they are not (each version waits until engines have nothing in flight),
                     trainers  T + R + A (trainers step again once engines have their weights, and they their digests),
                     latency   (G + B + T) / (k + 1) + R )

    B = W (1 - made(P - R)) + W (1 - made(2 (P - R))) + ... of the k steps before, drawn P = period(k) seconds apart

The last is why no age of k makes training more than k + 1 times as fast, whatever the rates. All of it leaves out that
steps differ, that what runs at once slows each other down, validation, and checkpoints. Where weights are not updated
in flight it is cautious: of several engines, those that have no long responses go on before the others.

How old the weights are that make a token follows, in flight, from when it is made: B after its step was drawn begins
what there is to generate, or, where engines are what limits, so much later that it ends just in time; and weights
become one step younger after each period. Where engines and trainers take nearly as long, chance decides how far
engines have run ahead. Not in flight, a sample keeps the weights that it began with.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import msgspec

_EVEN = 0.01
"""What differs less than this in length is as long."""
_HALVINGS = 60
"""Of what is not known of a period."""

Limit = Literal["nothing overlaps", "engines", "trainers", "latency"]


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a synchronous step, and how evenly its engines are used."""

    generation_s: float
    training_s: float
    """With the log-probabilities that are computed before."""
    refit_s: float = 0.0
    attest_s: float = 0.0
    """From then until digests agree."""
    longest_over_mean: float = 1.0
    """Length of a step's longest response over that of the mean."""
    samples_per_place: float = 1.0
    """Samples of a step over what engines run at once. Below one it counts as one: nobody knows of a synchronous run
    how fast its engines would be with more to do at once than they ever had."""

    @property
    def work_s(self) -> float:
        """What generation would take if no engine ever waited for the longest responses: W."""
        waves, longest = max(1.0, self.samples_per_place), self.longest_over_mean
        at_once = longest - 1.0
        after_many = min(at_once, longest * (0.8 - longest / (4.0 * longest - 2.0)))
        return self.generation_s * waves / (waves + after_many + (at_once - after_many) / waves)

    def made(self, seconds: float) -> float:
        """Return the share of a step's tokens that are made so long after its generation began."""
        share = min(max(seconds / self.generation_s, 0.0), 1.0)
        unevenness = self.generation_s / self.work_s - 1.0
        if unevenness < _EVEN:
            return share
        power: float = share ** (1.0 + 1.0 / unevenness)
        return (1.0 + unevenness) * share - unevenness * power

    def left_s(self, period_s: float, num_steps: int) -> float:
        """Return what engines have yet to do for so many steps, begun one period after the other, the last of them
        a period ago: B."""
        return self.work_s * sum(1.0 - self.made(step * period_s) for step in range(1, num_steps + 1))


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What an age costs and gains."""

    age: int
    period_s: float
    """Of a step."""
    speedup: float
    """Over synchronous training."""
    limit: Limit
    """Which cycle is the slowest."""
    share_by_age: tuple[float, ...] | None
    """Of tokens, by the age of the weights that make them: 0 first, `age` last; None where it is not predicted."""
    engines_idle: float
    """Share of what engines could do."""
    trainers_idle: float
    """Share of the time."""


def predict(rates: Rates, age: int, *, in_flight: bool) -> Prediction:
    """Predict steps whose samples may be so old; `in_flight` says whether engines take weights while they generate."""
    synchronous_s = max(rates.generation_s, rates.attest_s) + rates.training_s + rates.refit_s
    period_s, limit = _slowest(rates, age, in_flight) if age else (synchronous_s, "nothing overlaps")
    return Prediction(
        age=age,
        period_s=period_s,
        speedup=synchronous_s / period_s,
        limit=limit,
        share_by_age=_share_by_age(rates, age, period_s, limit) if in_flight or age == 0 else None,
        engines_idle=max(0.0, 1.0 - rates.work_s / period_s),
        trainers_idle=max(0.0, 1.0 - rates.training_s / period_s),
    )


def most_times_as_fast(age: int) -> int:
    """Return what no rates make training with this age faster than, as a multiple of synchronous training."""
    return age + 1


def _slowest(rates: Rates, age: int, in_flight: bool) -> tuple[float, Limit]:
    """Return the period of an age that is not 0, and the cycle that it is."""

    def cycles(period_s: float) -> dict[Limit, float]:
        generation_s = rates.generation_s + rates.left_s(period_s - rates.refit_s, age)
        return {
            "engines": (rates.work_s if in_flight else rates.generation_s) + rates.refit_s,
            "trainers": rates.training_s + rates.refit_s + rates.attest_s,
            "latency": (generation_s + rates.training_s) / (age + 1) + rates.refit_s,
        }

    # The longer the period, the less is left to do of steps before: there is one period that is as long as its cycles.
    low_s = max(cycles(math.inf).values())
    high_s = max(cycles(low_s).values())
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if max(cycles(middle_s).values()) > middle_s else (low_s, middle_s)
    found = cycles(high_s)
    return high_s, max(found, key=lambda name: found[name])


def _share_by_age(rates: Rates, age: int, period_s: float, limit: Limit) -> tuple[float, ...]:
    """Return the shares of tokens by age, 0 first, where weights are updated in flight."""
    between_s = period_s - rates.refit_s
    spare_s = (age + 1) * between_s - rates.training_s - rates.generation_s
    begins_s = spare_s if limit == "engines" else rates.left_s(between_s, age)
    made = [0.0, *(rates.made((step + 1) * between_s - begins_s) for step in range(age)), 1.0]
    return tuple(after - before for before, after in reversed([*pairwise(made)]))
