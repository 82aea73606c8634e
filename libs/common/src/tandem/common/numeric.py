"""Judgements of numbers: bounds, spreads, and what is out of all proportion.

float32 ends at 3.4e38. Losses multiply numbers, gradient norms square them, and both sum over a batch. A number of
at most 1e12 has a square of 1e24, which leaves fourteen orders of magnitude for sums and factors. Ratios of
probabilities are exponentials of differences: a token sampled with a log-probability of -40 may give a ratio of
e^40, with a square of 5.5e34. A token with a probability of 1e-18 is never sampled.

Every number is checked where it enters. A number out of bounds is an error of its sender or a failure of the
environment. Where the run must go on with it, its whole rollout group is set aside, so that none of its tokens are
valid.

A tolerance has a scale. ``0.7 + 0.1`` and ``0.8`` differ by 1e-16, two float32 sums of a million by 0.06, and neither
is a difference. So a spread counts relative to the size of the numbers that it is of. Whatever divides by a spread asks
here first, because dividing by one that is only rounding gives advantages of 200,000.

Outliers are finite, so that nothing stops a run from learning from them: an advantage of 4,000 among ones, a gradient
norm of 450,000 among threes.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import SampleScored
from tandem.common.values import beyond

LEAST_LOGPROB = -40.0
"""Lowest log-probability of a token sampled by an engine."""
LARGEST_LOG_RATIO = 80.0
"""Largest difference of two log-probabilities to exponentiate for a report; beyond it, float32 overflows."""
ROUNDING = 1e-6
"""Spread, as a fraction of the size of the numbers, up to which they count as equal: eight roundings of float32, which
environments and reward models compute with."""
FACTOR = 100.0
"""Multiple of the usual size above which a number is an outlier. Advantages, losses and gradient norms usually stay
within a tenth to ten times theirs."""
PHRASE = "out of all proportion"
"""Words in each line about an outlier, by which a diagnosis finds them."""
_FEWEST, _MOST = 5, 20
"""Optimizer steps with which another is compared."""
_LEAST_LOSS = 1.0
"""Smallest usual size of a loss: on the policy's own samples it is about 0, whatever nats or advantages it is in."""
_QUANTILE, _FEWEST_NUMBERS = 0.75, 3


def find_usual_size(numbers_X: NDArray[np.floating]) -> float:
    """Return the upper quartile of the sizes of numbers that are not zero; 0 if there are fewer than three.

    So up to a quarter of them may be outliers.
    """
    sizes_X = np.sort(np.abs(numbers_X[numbers_X != 0]))
    return float(sizes_X[int(_QUANTILE * (len(sizes_X) - 1))]) if len(sizes_X) >= _FEWEST_NUMBERS else 0.0


def find_outliers(numbers_X: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return a mask of the numbers that are more than `FACTOR` times the usual size."""
    usual = find_usual_size(numbers_X)
    return np.asarray(np.abs(numbers_X) > FACTOR * usual) if usual else np.zeros(numbers_X.shape, dtype=np.bool_)


class RecentSteps:
    """The gradient norms and losses of a model's last optimizer steps."""

    def __init__(self, grad_norms: Iterable[float] = (), losses: Iterable[float] = ()) -> None:
        """Begin with those of earlier steps, in order."""
        self.grad_norms = deque(grad_norms, maxlen=_MOST)
        self.losses = deque(losses, maxlen=_MOST)

    def add(self, loss: float, grad_norm: float) -> None:
        """Add an optimizer step."""
        self.grad_norms.append(grad_norm)
        self.losses.append(loss)

    def excess(self, loss: float, grad_norm: float) -> str:
        """Return what is out of all proportion to these steps in another; empty if nothing is, or they are few."""
        if len(self.losses) < _FEWEST:
            return ""
        usual_norm = statistics.median(self.grad_norms)
        usual_loss = max(_LEAST_LOSS, statistics.median(map(abs, self.losses)))
        for name, value, usual in (("gradient norm", grad_norm, usual_norm), ("loss", abs(loss), usual_loss)):
            if usual and value > FACTOR * usual:
                size = (
                    f"{value / usual:,.0f} times the usual {usual:.3g} of the last {len(self.losses)} optimizer steps"
                )
                return f"a {name} of {value:.4g} is {PHRASE}: {size}"
        return ""


def differ(
    values: NDArray[np.float64], axis: int = -1, size: NDArray[np.float64] | float | None = None
) -> NDArray[np.bool_]:
    """Tell whether the values along an axis differ by more than rounding.

    Args:
        values: finite numbers, at least one along the axis.
        axis: the axis to compare along; it is left out of the result.
        size: size of the numbers that the values were computed from, if these are larger, as those of a difference are.

    """
    largest = np.abs(values).max(axis=axis) if size is None else size
    return np.asarray(np.ptp(values, axis=axis) > ROUNDING * largest)


def bound(sample: SampleScored) -> SampleScored:
    """Return a restored sample with its numbers in bounds; a sample with a reward out of bounds is dropped.

    The rollout log may come from an earlier release, which had no bounds.
    """
    numbers = {"reward": sample.reward, **{f"components[{name!r}]": v for name, v in sample.components.items()}}
    wrong = [f"the {name} is {beyond(value)}" for name, value in numbers.items() if beyond(value)]
    spent = {name: value for name, value in sample.spent.items() if not beyond(value)}
    if not wrong:
        return sample if len(spent) == len(sample.spent) else msgspec.structs.replace(sample, spent=spent)
    failure = sample.failure or f"group {sample.group}, sample {sample.sample}: {wrong[0]}"
    return msgspec.structs.replace(sample, reward=0.0, components={}, spent=spent, failure=failure, dropped=True)
