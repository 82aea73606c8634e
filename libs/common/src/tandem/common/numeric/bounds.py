"""Numeric bounds: the values that float32 can carry through a run's arithmetic.

float32 ends at 3.4e38. Losses multiply numbers, gradient norms square them, and both sum over a batch. A number of
at most 1e12 has a square of 1e24, which leaves fourteen orders of magnitude for sums and factors. Ratios of
probabilities are exponentials of differences: a token sampled with a log-probability of -40 may give a ratio of
e^40, with a square of 5.5e34. A token with a probability of 1e-18 is never sampled.

Every number is checked where it enters. A number out of bounds is an error of its sender or a failure of the
environment. Where the run must go on with it, its whole rollout group is set aside, so that none of its tokens are
valid.
"""

from __future__ import annotations

import msgspec

from tandem.common.messages import SampleScored
from tandem.common.returned import beyond

LEAST_LOGPROB = -40.0
"""Lowest log-probability of a token sampled by an engine."""
LARGEST_LOG_RATIO = 80.0
"""Largest difference of two log-probabilities to exponentiate for a report; beyond it, float32 overflows."""


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
