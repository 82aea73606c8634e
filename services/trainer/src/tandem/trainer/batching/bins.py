"""Bin packing: the sequences that share a row with a bounded number of tokens.

Each algorithm takes lengths and a capacity that none of them exceeds, and returns bins of indices into the lengths. All
are deterministic, so that every rank finds the same bins.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from tandem.config.schema import PackingAlgorithm


def pack(lengths: Sequence[int], capacity: int, algorithm: PackingAlgorithm) -> list[list[int]]:
    """Put every index into one bin, so that no bin's lengths add up to more than `capacity`.

    With ``OPT`` the least number of bins of any packing:

    - ``concatenative`` takes the sequences in order and opens a bin when one does not fit: at most 2 OPT - 1.
    - ``first_fit_shuffle`` puts each into the first bin with room, in a random but fixed order: at most 1.7 OPT (Dosa
      and Sgall 2013).
    - ``first_fit_decreasing`` does that in descending order: at most 11/9 OPT + 6/9 (Dosa 2007).
    - ``modified_first_fit_decreasing`` first pairs large and medium sequences: at most 71/60 OPT + 31/6 (Johnson
      and Garey 1985, "A 71/60 theorem for bin packing").
    """
    assert all(length <= capacity for length in lengths), "the configuration's checks bound the lengths"
    match algorithm:
        case "concatenative":
            return _concatenative(lengths, capacity)
        case "first_fit_shuffle":
            return _first_fit(np.random.default_rng(0).permutation(len(lengths)).tolist(), lengths, capacity)
        case "first_fit_decreasing":
            return _first_fit(_descending(lengths), lengths, capacity)
        case "modified_first_fit_decreasing":
            return _modified_first_fit_decreasing(lengths, capacity)


def _descending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _concatenative(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return bins


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room_B = np.full(len(order), capacity, dtype=np.int64)  # one bin each, if all should need their own
    for index in order:
        first = int((room_B >= lengths[index]).argmax())
        if first == len(bins):
            bins.append([])
        bins[first].append(index)
        room_B[first] -= lengths[index]
    return bins


class _Ascending:
    """Items by length, which gives out the shortest, or the longest that fits."""

    def __init__(self, items: Sequence[int], lengths: Sequence[int]) -> None:
        self.items = sorted((lengths[index], index) for index in items)

    def shortest(self, count: int = 1) -> int | None:
        """Return the sum of the shortest `count` items; None if there are fewer."""
        return sum(length for length, _ in self.items[:count]) if len(self.items) >= count else None

    def take_shortest(self) -> tuple[int, int]:
        return self.items.pop(0)

    def take_longest(self, room: int) -> tuple[int, int]:
        """Take the longest item that is no longer than `room`. There must be one."""
        return self.items.pop(bisect.bisect_right(self.items, room, key=lambda item: item[0]) - 1)


def _modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Give each item over half the capacity a bin, filled with chosen others. Pack the rest by decreasing first fit."""
    classes: list[list[int]] = [[], [], [], []]  # large, medium (over 1/3), small (over 1/6), tiny
    for index in _descending(lengths):
        classes[sum(lengths[index] * parts <= capacity for parts in (2, 3, 6))].append(index)
    bins = [[index] for index in classes[0]]
    rooms = [capacity - lengths[index] for index in classes[0]]

    def put(number: int, item: tuple[int, int]) -> None:
        rooms[number] -= item[0]
        bins[number].append(item[1])

    medium, small = (_Ascending(classes[number], lengths) for number in (1, 2))
    for number, room in enumerate(rooms):
        shortest = medium.shortest()
        if shortest is not None and shortest <= room:
            put(number, medium.take_longest(room))
    for number in reversed(range(len(bins))):
        two = small.shortest(2)
        if len(bins[number]) == 1 and two is not None and two <= rooms[number]:
            put(number, small.take_shortest())
            put(number, small.take_longest(rooms[number]))
    remaining = _Ascending([item[1] for item in (*medium.items, *small.items)] + classes[3], lengths)
    for number in range(len(bins)):
        while (shortest := remaining.shortest()) is not None and shortest <= rooms[number]:
            put(number, remaining.take_longest(rooms[number]))
    unplaced = sorted((index for _, index in remaining.items), key=lambda index: (-lengths[index], index))
    return bins + _first_fit(unplaced, lengths, capacity)
