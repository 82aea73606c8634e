"""Outliers: numbers out of all proportion to their neighbours, which one bad sample puts into a step.

They are finite, so that nothing stops a run from learning from them: an advantage of 4,000 among ones, a gradient norm
of 450,000 among threes.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

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
