"""Bounds of the numbers that a run computes with: what float32 carries through the arithmetic.

float32 ends at 3.4e38. Losses multiply a number by others, gradient norms square it, and both sum over a batch. So a
number of at most 1e12 has a square of 1e24, which leaves fourteen orders of magnitude for the sum and for what it is
multiplied with. Ratios of probabilities are exponentials of differences: an engine that drew a token with a
log-probability of -40 may give a ratio of e^40, whose square is 5.5e34. A token of 1e-18 in probability is never drawn.

Every number is held to these bounds where it enters. What is beyond them is the fault of who made it, a failure of an
environment, or, where the run must go on with it, has its rollout group set aside: no token of the group counts.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import LARGEST, SampleScored
from tandem.common.returned import beyond

LEAST_LOGPROB = -40.0
"""Of a token that an engine has drawn."""
LARGEST_LOG_RATIO = 80.0
"""Difference of two log-probabilities whose exponential is reported: beyond it, float32 has no finite ratio."""


def within(values: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which numbers a run can compute with; none that is not finite."""
    return np.asarray(np.abs(values) <= LARGEST)


def bounded(sample: SampleScored) -> SampleScored:
    """Return a recorded sample with numbers that a run can compute with: one that has others is dropped.

    A record may be of an earlier release, which knew no bounds.
    """
    numbers = {"reward": sample.reward, **{f"components[{name!r}]": v for name, v in sample.components.items()}}
    wrong = [f"the {name} is {beyond(value)}" for name, value in numbers.items() if beyond(value)]
    spent = {name: value for name, value in sample.spent.items() if not beyond(value)}
    if not wrong:
        return sample if len(spent) == len(sample.spent) else msgspec.structs.replace(sample, spent=spent)
    failure = sample.failure or f"group {sample.group}, sample {sample.sample}: {wrong[0]}"
    return msgspec.structs.replace(sample, reward=0.0, components={}, spent=spent, failure=failure, dropped=True)
