"""The order of problems and the seeds of samples: pure functions of the run's seed."""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tandem.config import Config
from tandem.samples.data_sets.drawing import ChosenSets, drawing_pattern


@functools.lru_cache(maxsize=32)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(size)


def epoch_index(seed: int, size: int, position: int, *, shuffle: bool = True) -> int:
    """Return the index at a position of the stream of epochs: each a new permutation of `size`.

    Without `shuffle`, each epoch is in order.
    """
    epoch, place = divmod(position, size)
    return int(_permutation(seed, epoch, size)[place]) if shuffle else place


def epoch_stream(seed: int, size: int, first: int, count: int, *, shuffle: bool = True) -> list[int]:
    """Return `count` indexes of the stream of epochs, from position `first` on."""
    return [epoch_index(seed, size, position, shuffle=shuffle) for position in range(first, first + count)]


class _Pattern:
    """Sets that take their places in a repeated pattern."""

    def __init__(self, pattern: tuple[int, ...]) -> None:
        self._pattern = pattern
        self._counts = [0] * (max(pattern) + 1)
        self._ranks: list[int] = []
        """For each place, the number of earlier places with the same set."""
        for number in pattern:
            self._ranks.append(self._counts[number])
            self._counts[number] += 1

    def at(self, position: int) -> tuple[int, int]:
        """Return the set of a place of the stream, and the place within that set's stream."""
        cycle, place = divmod(position, len(self._pattern))
        number = self._pattern[place]
        return number, cycle * self._counts[number] + self._ranks[place]


class DataOrder:
    """The order in which items of several concatenated datasets are drawn.

    A repeated pattern says which set each place of the stream is drawn from; each set has a stream of epochs of its
    own. The item at a place thus depends on no other place, and a resumed run draws the same.
    """

    def __init__(self, config: Config, sizes: Sequence[int]) -> None:
        """`sizes` are the sizes of the sets. Without weights or a pattern, the sets are drawn from as one.

        Raises `ConfigError` if the user's function that chooses between them cannot be imported.
        """
        data = config.data
        self._seed, self._shuffle = config.algorithm_section.seed, data.shuffle
        chosen = ChosenSets(config, sizes) if data.chooser is not None and len(data.train) == len(sizes) else None
        pattern = drawing_pattern(data, len(sizes))
        self._sets: ChosenSets | _Pattern = chosen or _Pattern(pattern)
        self._sizes = [*sizes] if chosen is not None or len({*pattern}) > 1 else [sum(sizes)]
        self._starts = [0, *accumulate(self._sizes)][:-1]

    @property
    def num_sets(self) -> int:
        """Number of sets that are drawn from separately."""
        return len(self._sizes)

    def index(self, position: int) -> int:
        """Return the index at a position."""
        number, own = self._sets.at(position)
        return self._starts[number] + epoch_index(self._seed, self._sizes[number], own, shuffle=self._shuffle)

    def first_of(self, number: int, count: int) -> list[int]:
        """Return the first `count` indexes that are drawn from one set."""
        size = self._sizes[number]
        own = epoch_stream(self._seed, size, 0, min(count, size), shuffle=self._shuffle)
        return [self._starts[number] + index for index in own]

    def following(self, index: int) -> Iterator[int]:
        """Yield those that replace an index in turn: all others of its set."""
        number = bisect_right(self._starts, index) - 1
        start, size = self._starts[number], self._sizes[number]
        return (start + (index - start + distance) % size for distance in range(1, size))


def sample_seed(seed: int, step: int, purpose: str, group: int, sample: int) -> int:
    """Return the unsigned 64-bit seed of one sample: BLAKE2b of its identity within the run."""
    identity = f"{seed}/{purpose}/{step}/{group}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")
