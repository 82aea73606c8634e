"""Model groups: the models that each trainer holds.

Trainers are numbered consecutively: first the policy's, then those of every model that has processes in
``cluster.processes_of``. Each of these groups is independent: its processes divide models and batches among
themselves as if there were no others. `tandem.trainer.exchange` moves data between groups.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from tandem.config.schema.columns import Model

if TYPE_CHECKING:  # the configuration's own checks may import this module
    from tandem.config.schema import Config


class ModelGroup(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model group: the processes that hold the same models, which no other process holds."""

    models: tuple[Model, ...]
    """Models of the group; the first determines the number of replicas."""
    first: int
    """Index of its first trainer."""
    size: int

    @cached_property
    def name(self) -> Model:
        """Name of the group: its first model."""
        return self.models[0]

    @cached_property
    def trainers(self) -> range:
        """Indexes of its trainers."""
        return range(self.first, self.first + self.size)

    @cached_property
    def has_policy(self) -> bool:
        """Whether engines get its weights."""
        return self.name == "policy"


def list_model_groups(config: Config) -> tuple[ModelGroup, ...]:
    """Return the model groups of a run, the policy's first."""
    sizes = config.processes_of
    ends = itertools.accumulate(sizes.values())
    policy_models = tuple(model for model in config.holds if model == "policy" or model not in sizes)
    return tuple(
        ModelGroup(models=policy_models if model == "policy" else (model,), first=end - size, size=size)
        for (model, size), end in zip(sizes.items(), ends, strict=True)
    )


def find_model_group(config: Config, index: int) -> ModelGroup:
    """Return the model group of a trainer."""
    return next(model_group for model_group in list_model_groups(config) if index in model_group.trainers)
