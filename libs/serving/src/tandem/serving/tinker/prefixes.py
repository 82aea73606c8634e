"""Common prefixes of the sequences of a call, which trainers compute once.

A client sends whole sequences and does not say what was the prompt. Those of a group have a common prefix, and all of a
recipe's prompts may begin alike. ``n`` sequences with a prefix of ``p`` tokens save ``(n - 1) p`` of them.

In the order of their tokens, sequences with a common prefix are neighbours, which makes a tree of prefixes. From its
leaves on, what is below a prefix joins its group if that saves more than its own groups do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.samples.batch_sharding import NO_PROMPT


class CommonPrefixes(NamedTuple):
    """Common prefixes, of ``S`` sequences."""

    prompt_S: NDArray[np.int32]
    """Number of the group, `NO_PROMPT` for a sequence alone."""
    prompt_lengths_S: NDArray[np.int32]
    """Tokens of the prefix, fewer than those of each sequence of the group; 0 for a sequence alone."""


class _Prefix:
    """A prefix of neighbours in the order of their tokens, or a sequence, which has no parts."""

    def __init__(self, first: int, last: int, length: int, parts: list[_Prefix]) -> None:
        self.first, self.last = first, last
        """Places of the first and the last sequence."""
        self.length = length
        self.parts = parts
        """Longer prefixes, and sequences, with this one."""
        self.joined: list[_Prefix] = []
        """Parts whose sequences are a group."""
        self.saved = 0
        """Tokens that all groups save."""

    def join(self) -> None:
        """Make a group of the parts for which that is best; those of the parts are there."""
        gains = [part.size * self.length - part.saved for part in self.parts]
        self.saved = sum(part.saved for part in self.parts)
        gain = sum(gain for gain in gains if gain > 0) - self.length  # which is computed once
        if gain > 0:
            self.joined = [part for part, part_gain in zip(self.parts, gains, strict=True) if part_gain > 0]
            self.saved += gain

    @property
    def size(self) -> int:
        """Sequences that it has."""
        return self.last - self.first + 1


def prefixes_of(sequences: Sequence[NDArray[np.int32]]) -> CommonPrefixes:
    """Return groups of sequences, of one token or more, with what they begin with."""
    order = sorted(range(len(sequences)), key=lambda row: sequences[row].astype(">i4").tobytes())
    prefixes = CommonPrefixes(np.full(len(order), NO_PROMPT, np.int32), np.zeros(len(order), np.int32))
    for prefix in _tree([_common(sequences[row], sequences[next_row]) for row, next_row in itertools.pairwise(order)]):
        prefix.join()
        if prefix.joined:  # instead of groups of these parts
            rows = [order[place] for part in prefix.joined for place in range(part.first, part.last + 1)]
            prefixes.prompt_S[rows] = min(rows)
            prefixes.prompt_lengths_S[rows] = prefix.length
    return prefixes


def _tree(lengths: list[int]) -> list[_Prefix]:
    """Return the prefixes of neighbours, of which these are the lengths; the parts of each before it."""
    ends = {place: _Prefix(place, place, 0, []) for place in range(len(lengths) + 1)}
    """Prefixes and sequences that no shorter one has yet, by their first and by their last place."""
    prefixes: list[_Prefix] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        before, after, length = ends[place], ends[place + 1], lengths[place]
        if length == 0:
            break
        if before.parts and before.length == length:
            before.parts.append(after)
            before.last = after.last
        else:
            before = _Prefix(before.first, after.last, length, [before, after])
            prefixes.append(before)
        ends[before.first] = ends[after.last] = before
    return prefixes


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Return the length of the common prefix, without the last token of the shorter."""
    size = min(len(first), len(second)) - 1
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size
