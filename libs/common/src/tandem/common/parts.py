"""Parts: what the weight plane moves weights between.

A trainer rank is one part, and so is an engine of one worker; each is called like its process. The workers of an engine
that has several are parts of its process, ``rollout-0/0``, ``rollout-0/1``, ...: each has a layout, a transfer program
and digests of its own, while orders, failures and versions are the engine's.
"""

from __future__ import annotations

_SEPARATOR = "/"


def part_names(process: str, num_parts: int) -> tuple[str, ...]:
    """Return the names of all parts of a process."""
    return (process,) if num_parts == 1 else tuple(f"{process}{_SEPARATOR}{index}" for index in range(num_parts))


def process_of(part: str) -> str:
    """Return the process that a part belongs to."""
    return part.partition(_SEPARATOR)[0]
