"""Spread: whether numbers differ, or are equal but for rounding.

A tolerance has a scale. ``0.7 + 0.1`` and ``0.8`` differ by 1e-16, two float32 sums of a million by 0.06, and neither
is a difference. So a spread counts relative to the size of the numbers that it is of. Whatever divides by a spread asks
here first, because dividing by one that is only rounding gives advantages of 200,000.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-6
"""Spread, as a fraction of the size of the numbers, up to which they count as equal: eight roundings of float32, which
environments and reward models compute with."""


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
