"""Sizes of a stream's messages, and thus the memory that streaming takes; without torch."""

from __future__ import annotations

BUCKET_BYTES = 16 << 20
"""Largest message. Each link has two in transit."""

SMALLEST_BUCKET_BYTES = 1 << 20
"""Size where so many processes stream to each other that full-sized buckets would take too much memory."""

BUDGET_BYTES = 512 << 20
"""Most memory for buckets of one size, in a process that receives from its whole transfer group."""

DEPTH = 2
"""Messages of a transfer in transit at once, each in its own buffer."""


_SLOW_GB_PER_S = 0.25
"""Rate of a link up to which differences of any size pay, since finding them takes less time than sending all."""

_LARGEST_DIFFERENCE = 1 / 16
"""Largest share of changed elements that pays on faster links; `benchmarks/test_differences.py` measures both."""


def largest_difference(gigabytes_per_s: float) -> float:
    """Return the largest share of changed elements of which only these are sent over a link."""
    return 1.0 if gigabytes_per_s <= _SLOW_GB_PER_S else _LARGEST_DIFFERENCE


def bucket_bytes(num_members: int, num_bytes: int) -> int:
    """Return the largest message for a transfer of `num_bytes` in a group of `num_members`."""
    # Packing, sending and unpacking overlap only if there are several messages.
    return max(SMALLEST_BUCKET_BYTES, min(BUCKET_BYTES, BUDGET_BYTES // (2 * num_members), num_bytes // 4))
