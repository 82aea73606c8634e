"""The choice of a digest's kernel on a CPU: the fastest one that is exact on this processor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

Span = tuple[int, int, int, int]
"""Global indices along one dimension: the dimension (1 is the last), the first index, the count, the step."""
Kernel = Callable[[torch.Tensor, tuple[Span, ...]], torch.Tensor]
"""Sums over columns: from rows of a signed integer type, with unit stride within a row, to an int64 sum of each row."""

MAX_COLUMNS = 2**14
"""Elements of a row summed at once: with 4-byte elements, a sum of 2**16 products of two bytes fits 32 bits."""


def fastest_exact(of_bytes: Kernel, wide: Kernel) -> Kernel:
    """Return the faster of two kernels, but the wide one if products of bytes are not added exactly here."""
    if not is_exact(of_bytes, wide):
        return wide
    extreme_RC, columns = _extremes()
    return min((of_bytes, wide), key=lambda kernel: _seconds(kernel, extreme_RC, columns))


def is_exact(of_bytes: Kernel, wide: Kernel) -> bool:
    """Check that products of bytes are added exactly on this processor.

    Without 8-bit dot products, pairs of products are added in 16 bits that saturate. Two processes that each chose the
    faster kernel would then disagree about the same weights.
    """
    extremes = _extremes()
    return torch.equal(of_bytes(*extremes), wide(*extremes))


def _extremes() -> tuple[torch.Tensor, tuple[Span, ...]]:
    """Return the words and columns with the largest possible sums.

    Every byte is at its minimum in half of the rows and at its maximum in the others. Both are needed: libraries first
    shift bytes to 0..255, and then only the highest saturate.
    """
    lowest_RC = torch.full((8, MAX_COLUMNS), -0x7F7F7F80, dtype=torch.int32)
    highest_RC = torch.full((8, MAX_COLUMNS), 0x7F7F7F7F, dtype=torch.int32)
    return torch.cat([lowest_RC, highest_RC]), ((1, 0, MAX_COLUMNS, 1),)


def _seconds(kernel: Kernel, words_RC: torch.Tensor, columns: tuple[Span, ...]) -> float:
    best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        kernel(words_RC, columns)
        best = min(best, time.perf_counter() - started)
    return best
