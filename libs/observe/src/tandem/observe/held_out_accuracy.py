"""Lack of progress, by the accuracy on held-out problems; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

NEAR_ZERO = 0.05
"""Initial held-out accuracy below which nearly every group is all wrong and teaches nothing."""
STILL_LOW = 0.15
"""Final held-out accuracy from which a start near zero did no harm."""
AS_LOW = 0.1
"""Held-out accuracy of a live run up to which a start near zero has done harm so far."""
LEAST_GAIN = 0.02
"""Least rise of held-out accuracy that counts as movement."""
LEAST_FALL = 0.1
"""Least fall of held-out accuracy, from its beginning, that counts as a collapse."""
FELL = ": it fell"
"""End of the description of a collapse."""
SOLVED = 0.95
"""Held-out accuracy from which nothing is left to gain."""
MANY_STEPS = 20
"""Number of steps that should have shown progress."""


def no_progress(accuracy: Sequence[tuple[int, float]]) -> str | None:
    """Describe what is wrong with the course of held-out accuracy; None if nothing is, or too little is known."""
    if (low_course := low_start(accuracy, STILL_LOW)) is not None or not _tells(accuracy):
        return low_course
    start, end, best = accuracy[0][1], accuracy[-1][1], max(value for _, value in accuracy)
    if start - end >= LEAST_FALL:
        return f"{_course(accuracy)}, {best:.1%} at best{FELL}"
    if best - start < LEAST_GAIN and start < SOLVED:
        return f"{_course(accuracy)}, {best:.1%} at best: it hardly moved"
    return None


def low_start(accuracy: Sequence[tuple[int, float]], still_low: float = AS_LOW) -> str | None:
    """Describe held-out accuracy that began near zero and is below `still_low`; None if it is not, or unknown."""
    if not _tells(accuracy) or accuracy[0][1] >= NEAR_ZERO or accuracy[-1][1] >= still_low:
        return None
    cause = "the model could hardly do the task to begin with, so that nearly no sample was rewarded"
    return f"{_course(accuracy)}: {cause}; more SFT first"


class LowStart:
    """A warning, given once even if resumed, that a live run started with too weak a model."""

    def __init__(self, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        self._accuracy: list[tuple[int, float]] = []
        self._is_said = False
        for step, metrics in history:
            self.warning(step, metrics)

    def warning(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Note the metrics of a finished step; return the warning if it is due."""
        if "val_accuracy" not in metrics:
            return None
        self._accuracy.append((step, metrics["val_accuracy"]))
        if self._is_said or (low_course := low_start(self._accuracy)) is None:
            return None
        self._is_said = True
        return f"warning: {low_course}"


def _tells(accuracy: Sequence[tuple[int, float]]) -> bool:
    return len(accuracy) >= 2 and accuracy[-1][0] - accuracy[0][0] >= MANY_STEPS


def _course(accuracy: Sequence[tuple[int, float]]) -> str:
    (first, start), (last, end) = accuracy[0], accuracy[-1]
    return f"held-out accuracy was {start:.1%} in step {first}, and {end:.1%} in step {last}"
