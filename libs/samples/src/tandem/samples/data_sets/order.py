"""The items of a run in the order in which they are drawn, and the seeds of its samples."""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import DataError
from tandem.common.user_code import line, named, shown
from tandem.config import Config
from tandem.config.named import GENERATED
from tandem.config.schema import DataConfig
from tandem.config.schema.data import set_names

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")

NUM_CHECKED = 256
"""Number of items tokenised before a run begins: the first that it draws."""
_NUM_KEPT = 4096
"""Number of encoded items that are cached: a step is requested several times."""
_CHOOSER_KEY = "data.custom_dataloader"
_FINEST = 1000
"""Most places of a pattern, to which weights are rounded."""


def epoch_index(seed: int, size: int, position: int, *, shuffle: bool = True) -> int:
    """Return the index at a position of the stream of epochs: each a new permutation of `size`.

    Without `shuffle`, each epoch is in order.
    """
    epoch, place = divmod(position, size)
    return int(_permutation(seed, epoch, size)[place]) if shuffle else place


def epoch_stream(seed: int, size: int, first: int, count: int, *, shuffle: bool = True) -> list[int]:
    """Return `count` indexes of the stream of epochs, from position `first` on."""
    return [epoch_index(seed, size, position, shuffle=shuffle) for position in range(first, first + count)]


@functools.lru_cache(maxsize=32)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(size)


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
        chosen_sets = ChosenSets(config, sizes) if data.chooser is not None and len(data.train) == len(sizes) else None
        pattern = _choose_pattern(data, len(sizes))
        self._sets: ChosenSets | DrawingPattern | None = chosen_sets or (
            DrawingPattern(pattern) if len({*pattern}) > 1 else None
        )
        """The sets that take turns in the stream; None if there is one."""
        self._sizes = [sum(sizes)] if self._sets is None else [*sizes]
        self._starts = [0, *accumulate(self._sizes)][:-1]

    @property
    def num_sets(self) -> int:
        """Number of sets that are drawn from separately."""
        return len(self._sizes)

    def index(self, position: int) -> int:
        """Return the index at a position."""
        number, set_position = (0, position) if self._sets is None else self._sets.locate(position)
        return self._starts[number] + epoch_index(self._seed, self._sizes[number], set_position, shuffle=self._shuffle)

    def first_of(self, number: int, count: int) -> list[int]:
        """Return the first `count` indexes that are drawn from one set."""
        size = self._sizes[number]
        indexes = epoch_stream(self._seed, size, 0, min(count, size), shuffle=self._shuffle)
        return [self._starts[number] + index for index in indexes]

    def yield_replacements(self, index: int) -> Iterator[int]:
        """Yield those that replace an index in turn: all others of its set."""
        number = bisect_right(self._starts, index) - 1
        start, size = self._starts[number], self._sizes[number]
        return (start + (index - start + distance) % size for distance in range(1, size))


class ItemLengths(msgspec.Struct, Generic[Item, Encoded], frozen=True):
    """The lengths of items before and after they are encoded: most items are so short that they fit."""

    text_bytes: Callable[[Item], int]
    """Bytes of an item's text, before a template adds what it adds to all."""
    num_tokens: Callable[[Encoded], int]
    limit: int
    """Tokens with which an item fits."""


class LazyDataset(Generic[Item, Encoded]):
    """The training items of a run, each encoded when a step first takes it.

    An item that does not fit the context is left out: the next fitting item of its set takes its place. The draw thus
    depends on the items alone, and a resumed run draws the same.

    Most faults of a dataset are in all of its items. The first items drawn are therefore encoded at once. Where a task
    generated them, so are all others but those that would fit with a token for each byte of text that they have more
    than the first ones.

    Args:
        config: Configuration of the run.
        items: One at least, unless none will be drawn.
        encode: Returns None for an item that does not fit, and raises `DataError` for one that cannot be encoded.
        sizes: Sizes of the sets that `items` concatenates; empty if there is one.
        lengths: Without them, all items that a task generated are encoded at once.

    Raises:
        DataError: one of the first cannot be encoded; or none of them fits, or none of the first of a set.
    """

    def __init__(
        self,
        config: Config,
        items: Sequence[Item],
        encode: Callable[[Item], Encoded | None],
        sizes: Sequence[int] = (),
        lengths: ItemLengths[Item, Encoded] | None = None,
    ) -> None:
        self._num_items = len(items)
        self._encoded = functools.lru_cache(_NUM_KEPT)(lambda index: encode(items[index]))
        self._order = DataOrder(config, sizes or (len(items),))
        is_made = config.data.dataset_name in GENERATED
        self.num_checked = len(items) if is_made else min(NUM_CHECKED, len(items))
        """Number of items that were encoded at once, or are so short that they fit ..."""
        checked = [self._order.index(position) for position in range(self.num_checked)]
        if is_made and lengths is not None:
            first, remaining = checked[:NUM_CHECKED], checked[NUM_CHECKED:]
            checked = [*first, *self._find_long(items, first, remaining, lengths)]
        self.num_too_long = sum(self._encoded(index) is None for index in checked)
        """... and of those that do not fit."""
        if items and self.num_too_long == self.num_checked:
            which = "every one" if self.num_checked == len(items) else f"each of the first {self.num_checked}"
            raise DataError(f"data: {which} is longer than policy.max_total_sequence_length allows")
        if self._order.num_sets > 1:
            self._check_sets()

    def __len__(self) -> int:
        """Return the number of items, including those that do not fit."""
        return self._num_items

    def draw(self, first: int, count: int) -> list[Encoded]:
        """Return `count` items, from position `first` on, of the stream of epochs."""
        return [self.get_item(position) for position in range(first, first + count)]

    def get_item(self, position: int) -> Encoded:
        """Return the item at a position of the stream of epochs, or the next of its set that fits."""
        index = self._order.index(position)
        item = self._encoded(index)
        if item is None:
            candidates = map(self._encoded, self._order.yield_replacements(index))
            item = next((candidate for candidate in candidates if candidate is not None), None)
        assert item is not None, "one of the first items of each set fits"
        return item

    def _find_long(
        self, items: Sequence[Item], first: Sequence[int], remaining: Iterable[int], lengths: ItemLengths[Item, Encoded]
    ) -> list[int]:
        """Return those of the remaining that may be too long: they have so many more bytes than the first ones."""
        encoded = ((index, self._encoded(index)) for index in first)
        added = [lengths.num_tokens(item) - lengths.text_bytes(items[index]) for index, item in encoded if item]
        most_added = max(added, default=lengths.limit)
        return [index for index in remaining if lengths.text_bytes(items[index]) + most_added > lengths.limit]

    def _check_sets(self) -> None:
        """Raise `DataError` if none of a set's first items fits; they stand for all of it."""
        for number in range(self._order.num_sets):
            first = self._order.first_of(number, NUM_CHECKED)
            if all(self._encoded(index) is None for index in first):
                raise DataError(
                    f"data.train[{number}]: each of the first {len(first)} is longer than "
                    "policy.max_total_sequence_length allows"
                )


class DrawingPattern:
    """Sets that take their places in a repeated pattern."""

    def __init__(self, pattern: tuple[int, ...]) -> None:
        self._pattern = pattern
        self._counts = [0] * (max(pattern) + 1)
        self._ranks: list[int] = []
        """For each place, the number of earlier places with the same set."""
        for number in pattern:
            self._ranks.append(self._counts[number])
            self._counts[number] += 1

    def locate(self, position: int) -> tuple[int, int]:
        """Return the set of a place of the stream, and the place within that set's stream."""
        cycle, place = divmod(position, len(self._pattern))
        number = self._pattern[place]
        return number, cycle * self._counts[number] + self._ranks[place]


class ChosenSets:
    """Sets that a user's function chooses (``data.custom_dataloader``), step by step."""

    def __init__(self, config: Config, sizes: Sequence[int]) -> None:
        """Import the function. Raise `ConfigError` if that fails."""
        self._path = str(config.data.chooser)
        self._choose: Callable[..., object] = named(self._path, _CHOOSER_KEY)
        self._sizes = dict(zip(set_names(config.data.train), sizes, strict=True))
        self._per_step = config.rollout_section.num_prompts_per_batch
        self._numbers = {name: number for number, name in enumerate(self._sizes)}
        self._steps: list[list[int]] = []
        """For each step, the sets of its places."""
        self._before = [[0] * len(sizes)]
        """For each step, the number of items drawn from each set before it."""

    def locate(self, position: int) -> tuple[int, int]:
        """Return the set of a place, and the place within that set's stream. Raise `DataError` if choosing fails."""
        step, place = divmod(position, self._per_step)
        while len(self._steps) <= step:
            sets = self._call_chooser(len(self._steps) + 1)
            self._steps.append(sets)
            self._before.append([count + sets.count(n) for n, count in enumerate(self._before[-1])])
        sets = self._steps[step]
        return sets[place], self._before[step][sets[place]] + sets[:place].count(sets[place])

    def _call_chooser(self, step: int) -> list[int]:
        function_name = f"{_CHOOSER_KEY}: {self._path}"
        try:
            returned = self._choose(step, dict(self._sizes), self._per_step)
        except Exception as error:  # the function is the user's
            raise DataError(
                f"{function_name} raised {type(error).__name__} for step {step}: {line(str(error))}"
            ) from error
        names = [*returned] if isinstance(returned, list | tuple) else []
        if len(names) != self._per_step or any(name not in self._numbers for name in names):
            raise DataError(
                f"{function_name} returned {shown(returned)} for step {step}, not {self._per_step} names of data sets "
                f"({', '.join(self._numbers)})"
            )
        return [self._numbers[name] for name in names]


def encode_now(items: Sequence[Item], encode: Callable[[Item], Encoded | None]) -> list[Encoded]:
    """Return the items that fit, encoded. Raise `DataError` if there are items and none fits."""
    encoded_items = [encoded for encoded in map(encode, items) if encoded is not None]
    if items and not encoded_items:
        raise DataError("data: everything held out is longer than policy.max_total_sequence_length allows")
    return encoded_items


def sample_seed(seed: int, step: int, purpose: str, group: int, sample: int) -> int:
    """Return the unsigned 64-bit seed of one sample: BLAKE2b of its identity within the run."""
    identity = f"{seed}/{purpose}/{step}/{group}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def _choose_pattern(data: DataConfig, num_sets: int) -> tuple[int, ...]:
    """Return the set of each place in the repeated pattern; zeros where the sets are drawn from as one."""
    if len(data.train) != num_sets or num_sets < 2:
        return (0,)
    if data.use_multiple_dataloader and data.chooser is None:
        num_prompts = data.num_prompts_per_dataloader or 1
        return tuple(number for number in range(num_sets) for _ in range(num_prompts))
    if all(each.weight is None for each in data.train):
        return (0,)
    return _spread([1.0 if each.weight is None else each.weight for each in data.train])


def _spread(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the shortest pattern with these proportions, each spread evenly; every set has at least one place."""
    shares = [weight / sum(weights) * _FINEST for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda number: int(shares[number]) - shares[number])
    for number in by_rest[: max(0, _FINEST - sum(counts))]:
        counts[number] += 1
    divisor = math.gcd(*counts)
    places = [
        ((place + 0.5) / (count // divisor), number)
        for number, count in enumerate(counts)
        for place in range(count // divisor)
    ]
    return tuple(number for _, number in sorted(places))
