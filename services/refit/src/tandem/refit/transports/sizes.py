"""The sizes of a stream's messages, and so the memory that streaming takes; without torch."""

from __future__ import annotations

BUCKET_BYTES = 16 << 20
"""Largest message. Each link has two in flight."""

SMALLEST_BUCKET_BYTES = 1 << 20
"""Where so many processes stream to each other that buckets of full size would take too much memory."""

BUDGET_BYTES = 512 << 20
"""What the buckets of one size may take in a process that hears from everyone in its mesh."""

DEPTH = 2
"""Messages of a transfer under way at once, each in a buffer of its own."""


def bucket_bytes(num_members: int, num_bytes: int) -> int:
    """Return the largest size of a message of a transfer of so many bytes, among so many processes."""
    # Packing, sending and unpacking overlap only if there are several messages.
    return max(SMALLEST_BUCKET_BYTES, min(BUCKET_BYTES, BUDGET_BYTES // (2 * num_members), num_bytes // 4))
