"""Delta debugging: the smallest part of a set for which a test holds, by halves and quarters.

After Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input" (ddmin).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def reduce(units: Sequence[T], holds: Callable[[Sequence[T]], bool], most_parts: int | None = None) -> list[T]:
    """Return a part of `units` that the test holds for, and of which no smaller part of the last division would do.

    The test must hold for all of `units`, and is not asked about them. It is asked about halves first. If neither does,
    the units are divided more finely, into at most `most_parts` parts (None: down to single units), and what remains
    without each part is asked about too.
    """
    remaining, num_parts = [*units], 2
    while len(remaining) > 1:
        num_parts = min(num_parts, len(remaining))
        parts = [*divide(remaining, num_parts)]
        smaller = next((part for part in parts if holds(part)), None)
        if smaller is not None:
            remaining, num_parts = smaller, 2
            continue
        complements = [[unit for unit in remaining if unit not in part] for part in parts] if num_parts > 2 else []
        smaller = next((complement for complement in complements if holds(complement)), None)
        if smaller is not None:
            remaining, num_parts = smaller, max(num_parts - 1, 2)
            continue
        if num_parts >= min(len(remaining), most_parts or len(remaining)):
            break
        num_parts *= 2
    return remaining


def divide(units: Sequence[T], num_parts: int) -> Iterator[list[T]]:
    """Yield parts of nearly equal sizes, in order; none is empty if there are as many units."""
    for part in range(num_parts):
        first, last = (len(units) * number // num_parts for number in (part, part + 1))
        yield [*units[first:last]]
