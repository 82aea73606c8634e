"""Several datasets as one (``data.train``, ``data.validation``), each loaded as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from tandem.config import Config
from tandem.config.schema import DataConfig
from tandem.config.schema.data import DataSet, make_name_apart, set_names

Item = TypeVar("Item")


class LoadedItems(Protocol[Item]):
    """The items of one dataset."""

    @property
    def train(self) -> list[Item]:
        """Items to train on."""
        ...

    @property
    def held_out(self) -> dict[str, list[Item]]:
        """Held-out items."""
        ...


Sets = TypeVar("Sets", bound=LoadedItems)  # type: ignore[type-arg]


class ListedDataSet(msgspec.Struct, Generic[Sets], frozen=True, kw_only=True):
    """One dataset of a list."""

    listed: DataSet
    name: str
    """Name in metrics."""
    data: DataConfig
    """Section ``data`` for this dataset alone."""
    sets: Sets


def load_parts(
    config: Config, load: Callable[[Config], Sets], *, with_train: bool
) -> tuple[list[ListedDataSet[Sets]], list[ListedDataSet[Sets]]]:
    """Load the sets to train on, unless they are not wanted, and those to validate on.

    Of a validation set, the part that `load` returns for training is used.
    """
    data = config.data
    validation = tuple(data.of_set(each) for each in data.validation)

    def parts(listed: Sequence[DataSet], views: Sequence[DataConfig]) -> list[ListedDataSet[Sets]]:
        return [
            ListedDataSet(listed=each, name=name, data=view, sets=load(msgspec.structs.replace(config, data=view)))
            for each, name, view in zip(listed, set_names(listed), views, strict=True)
        ]

    return parts(data.train, data.train_sets) if with_train else [], parts(data.validation, validation)


def take_items(part: ListedDataSet[Sets]) -> list[Item]:
    """Return the items of a set, cut and repeated as its entry says."""
    return list(part.sets.train[: part.listed.max_samples]) * part.listed.repeat


class HeldOut(NamedTuple, Generic[Item]):
    """The held-out items of one dataset."""

    items: list[Item]
    data: DataConfig
    """Section ``data`` for this dataset alone."""


def collect_held_out(
    training: Sequence[ListedDataSet[Sets]], validation: Sequence[ListedDataSet[Sets]]
) -> dict[str, HeldOut[Item]]:
    """Return all held-out items, by name; a single set has the name ``""``."""
    held_sets: dict[str, HeldOut[Item]] = {}
    for part in training:
        for items in part.sets.held_out.values():
            if items:
                held_sets[part.name] = HeldOut(list(items), part.data)
    for part in validation:
        held_sets[make_name_apart(part.name, held_sets)] = HeldOut(take_items(part), part.data)
    return {"": next(iter(held_sets.values()))} if len(held_sets) == 1 else held_sets
