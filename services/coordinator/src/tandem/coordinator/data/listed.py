"""Several data sets as one (``data.train``, ``data.validation``), each loaded as though it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from tandem.config import Config
from tandem.config.schema import Data
from tandem.config.schema.data import DataSet, name_apart, set_names

Item = TypeVar("Item")


class Loaded(Protocol[Item]):
    """What one data set gives."""

    @property
    def train(self) -> list[Item]:
        """What is trained on, of one that is alone."""
        ...

    @property
    def held_out(self) -> dict[str, list[Item]]:
        """What is held out of it."""
        ...


Sets = TypeVar("Sets", bound=Loaded)  # type: ignore[type-arg]


class Part(msgspec.Struct, Generic[Sets], frozen=True, kw_only=True):
    """One data set of a list."""

    listed: DataSet
    name: str
    """What metrics call it."""
    data: Data
    """The section ``data`` as though it were alone."""
    sets: Sets


def load_parts(
    config: Config, load: Callable[[Config], Sets], *, with_train: bool
) -> tuple[list[Part[Sets]], list[Part[Sets]]]:
    """Load the sets to train on, unless they are not wanted, and those to validate on.

    Of the latter everything is what `load` takes for the training part.
    """
    data = config.data
    validation = tuple(data.of_set(each) for each in data.validation)

    def parts(listed: Sequence[DataSet], views: Sequence[Data]) -> list[Part[Sets]]:
        return [
            Part(listed=each, name=name, data=view, sets=load(msgspec.structs.replace(config, data=view)))
            for each, name, view in zip(listed, set_names(listed), views, strict=True)
        ]

    return parts(data.train, data.train_sets) if with_train else [], parts(data.validation, validation)


def taken(part: Part[Sets]) -> list[Item]:
    """Return what there is of a set to train on, or of one to validate on: as much and as often as it says."""
    return list(part.sets.train[: part.listed.max_samples]) * part.listed.repeat


class HeldOut(NamedTuple, Generic[Item]):
    """What is held out of one data set, or is one by itself."""

    items: list[Item]
    data: Data
    """The section ``data`` as though it were alone."""


def held_out(training: Sequence[Part[Sets]], validation: Sequence[Part[Sets]]) -> dict[str, HeldOut[Item]]:
    """Return everything held out, by name; what is alone has the name ``""``."""
    found: dict[str, HeldOut[Item]] = {}
    for part in training:
        for items in part.sets.held_out.values():
            if items:
                found[part.name] = HeldOut(list(items), part.data)
    for part in validation:
        found[name_apart(part.name, found)] = HeldOut(taken(part), part.data)
    return {"": next(iter(found.values()))} if len(found) == 1 else found
