"""A lazily tokenised dataset: a run begins before all of it is tokenised."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tandem.common.errors import DataError
from tandem.config import Config
from tandem.config.derive import GENERATED
from tandem.samples.data_sets.order import DataOrder

Item = TypeVar("Item")
Encoded = TypeVar("Encoded")

NUM_CHECKED = 256
"""Number of items tokenised before a run begins: the first that it draws."""
_NUM_KEPT = 4096
"""Number of encoded items that are cached: a step is requested several times."""


class LazyDataset(Generic[Item, Encoded]):
    """The training items of a run, each encoded when a step first takes it.

    An item that does not fit the context is left out: the next fitting item of its set takes its place. The draw thus
    depends on the items alone, and a resumed run draws the same.

    Most faults of a dataset are in all of its items. The first items drawn are therefore encoded at once, and all of
    them where a task generated them.

    Args:
        config: Configuration of the run.
        items: One at least, unless none will be drawn.
        encode: Returns None for an item that does not fit, and raises `DataError` for one that cannot be encoded.
        sizes: Sizes of the sets that `items` concatenates; empty if there is one.

    Raises:
        DataError: one of the first cannot be encoded; or none of them fits, or none of the first of a set.
    """

    def __init__(
        self,
        config: Config,
        items: Sequence[Item],
        encode: Callable[[Item], Encoded | None],
        sizes: Sequence[int] = (),
    ) -> None:
        self._num_items = len(items)
        self._encoded = functools.lru_cache(_NUM_KEPT)(lambda index: encode(items[index]))
        self._order = DataOrder(config, sizes or (len(items),))
        is_made = config.data.dataset_name in GENERATED
        self.num_checked = len(items) if is_made else min(NUM_CHECKED, len(items))
        """Number of items that were encoded at once ..."""
        first = map(self._order.index, range(self.num_checked))
        self.num_too_long = sum(self._encoded(index) is None for index in first)
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
        return [self.at(position) for position in range(first, first + count)]

    def at(self, position: int) -> Encoded:
        """Return the item at a position of the stream of epochs, or the next of its set that fits."""
        index = self._order.index(position)
        found = self._encoded(index)
        if found is None:
            others = map(self._encoded, self._order.following(index))
            found = next((other for other in others if other is not None), None)
        assert found is not None, "one of the first items of each set fits"
        return found

    def _check_sets(self) -> None:
        """Raise `DataError` if none of a set's first items fits; they stand for all of it."""
        for number in range(self._order.num_sets):
            first = self._order.first_of(number, NUM_CHECKED)
            if all(self._encoded(index) is None for index in first):
                raise DataError(
                    f"data.train[{number}]: each of the first {len(first)} is longer than "
                    "policy.max_total_sequence_length allows"
                )


def encode_now(items: Sequence[Item], encode: Callable[[Item], Encoded | None]) -> list[Encoded]:
    """Return the items that fit, encoded. Raise `DataError` if there are items and none fits."""
    found = [encoded for encoded in map(encode, items) if encoded is not None]
    if items and not found:
        raise DataError("data: everything held out is longer than policy.max_total_sequence_length allows")
    return found
