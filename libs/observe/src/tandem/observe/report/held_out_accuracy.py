"""Lack of progress, by the accuracy on held-out problems; pure."""

from __future__ import annotations

from collections.abc import Sequence

NEAR_ZERO = 0.05
"""Initial held-out accuracy below which nearly every group is all wrong and teaches nothing."""
STILL_LOW = 0.15
"""Final held-out accuracy from which a start near zero did no harm."""
LEAST_GAIN = 0.02
"""Least rise of held-out accuracy that counts as movement."""
SOLVED = 0.95
"""Held-out accuracy from which nothing is left to gain."""
MANY_STEPS = 20
"""Number of steps that should have shown progress."""


def no_progress(accuracy: Sequence[tuple[int, float]]) -> str | None:
    """Describe what is wrong with the course of held-out accuracy; return None if nothing is, or too little is
    known."""
    if len(accuracy) < 2 or accuracy[-1][0] - accuracy[0][0] < MANY_STEPS:
        return None
    (first, start), (last, end) = accuracy[0], accuracy[-1]
    best = max(value for _, value in accuracy)
    course = f"held-out accuracy was {start:.1%} in step {first}, and {end:.1%} in step {last}"
    if start < NEAR_ZERO and end < STILL_LOW:
        why = "the model could hardly do the task to begin with, so that nearly no sample was rewarded"
        return f"{course}: {why}; more SFT first"
    if best - start < LEAST_GAIN and start < SOLVED:
        return f"{course}, {best:.1%} at best: it hardly moved"
    return None
