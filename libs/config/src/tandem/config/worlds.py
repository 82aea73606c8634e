"""Which models each trainer holds: what the policy's processes do, or the one that it is there for.

Trainers are numbered through, the policy's first, then those of every model that ``cluster.processes_of`` gives some.
Each of these groups is a world of its own: its processes divide models and batches among themselves as they would if
there were no others. What passes between worlds is the business of `tandem.trainer.exchange`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from tandem.config.schema.columns import Model

if TYPE_CHECKING:  # so that the configuration's own checks may import this module
    from tandem.config.schema import Config


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that hold the same models, and no other process holds these."""

    models: tuple[Model, ...]
    """The first says how many replicas there are."""
    first: int
    """Index of the first of its trainers."""
    size: int

    @property
    def name(self) -> Model:
        """What it is called: by its first model."""
        return self.models[0]

    @property
    def trainers(self) -> range:
        """Indexes of its trainers."""
        return range(self.first, self.first + self.size)

    @property
    def has_policy(self) -> bool:
        """Whether its weights are what engines get."""
        return self.name == "policy"


def worlds_of(config: Config) -> tuple[World, ...]:
    """Return the worlds of a run, the policy's first."""
    sizes = config.processes_of
    ends = itertools.accumulate(sizes.values())
    rest = tuple(model for model in config.declaration.holds(config) if model == "policy" or model not in sizes)
    return tuple(
        World(models=rest if model == "policy" else (model,), first=end - size, size=size)
        for (model, size), end in zip(sizes.items(), ends, strict=True)
    )


def world_at(config: Config, index: int) -> World:
    """Return the world of a trainer."""
    return next(world for world in worlds_of(config) if index in world.trainers)
