"""Placement: the models that each trainer holds, and the GPUs of the cluster that a process uses.

Trainers are numbered consecutively: first the policy's, then those of every model that has processes in
``cluster.processes_of``. Each of these groups is independent: its processes divide models and batches among
themselves as if there were no others. `tandem.trainer.exchange` moves data between groups.

GPUs are numbered over all nodes, each of which has ``cluster.gpus_per_node``: with eight, number 9 is the second GPU
of the second node. Trainers take one each, from the first on, followed by the processes of other models. Engines
take as many as each needs: the policy's GPUs if colocated, else those reserved for generation. Reward models use the
last GPUs of a single node if some are reserved for them, and otherwise share those of their engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from tandem.config.schema.columns import Model

if TYPE_CHECKING:  # the configuration's checks import this module, and importing the schema would be a circle
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


VISIBLE = "CUDA_VISIBLE_DEVICES"
VISIBLE_TO_REWARD_MODELS = "TANDEM_REWARD_MODEL_DEVICES"
"""Variable with the value of `VISIBLE` for each reward model of a rollout process: a JSON object, by name in
``env``."""


def find_first_gpu_of_engines(config: Config) -> int:
    """Return the number of the first GPU for generation."""
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled:
        return 0
    if cluster.num_nodes > 1 and colocated.resources.num_nodes is not None:
        return (cluster.num_nodes - colocated.resources.num_nodes) * cluster.gpus_per_node
    if cluster.num_nodes == 1 and colocated.resources.gpus_per_node is not None:
        return cluster.gpus_per_node - count_gpus_of_reward_models(config) - colocated.resources.gpus_per_node
    return config.num_trainers


def count_gpus_per_engine(config: Config) -> int:
    """Return the number of GPUs per engine: none for one that runs on the CPU."""
    generation = config.policy.generation
    return generation.kind.num_workers(generation) if generation.kind.is_on_gpus else 0


def count_gpus_of_reward_models(config: Config) -> int:
    """Return the number of GPUs reserved for reward models, the last of a single node."""
    if config.cluster.num_nodes > 1 or not config.cluster.gpus_per_node:
        return 0
    return sum(entry.resources.gpus_per_node for entry in config.reward_models.values())


def select_visible_to_reward_models(config: Config, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the value of `VISIBLE` for each reward model of engine `index`: a reserved GPU, or the engine's first.

    The GPUs visible in `environment` count as all there are, before `select_visible_to_engine` rotates them.
    """
    gpus, aside = _list_gpus(config, environment), count_gpus_of_reward_models(config)
    shared = select_visible_to_engine(config, index, environment).partition(",")[0]
    first, visible = len(gpus) - aside, dict[str, str]()
    for name, entry in config.reward_models.items():
        num_reserved = entry.resources.gpus_per_node if aside and len(gpus) > aside else 0
        visible[name] = gpus[first + index % num_reserved] if num_reserved else shared
        first += num_reserved
    return visible


def select_visible_to_engine(config: Config, index: int, environment: Mapping[str, str]) -> str:
    """Return the value of `VISIBLE` for engine `index`: the node's GPUs, rotated so that its own come first.

    The node's other GPUs stay visible, because memory can only be opened on a visible one. The GPUs visible in
    `environment` count as all there are.
    """
    number = find_first_gpu_of_engines(config) + index * count_gpus_per_engine(config)
    gpus = _list_gpus(config, environment)
    first = number % max(1, len(gpus))
    return ",".join(gpus[first:] + gpus[:first])


def _list_gpus(config: Config, environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs of the node, by their names in `VISIBLE`."""
    listed = environment.get(VISIBLE)
    return (
        [*map(str, range(config.cluster.gpus_per_node))]
        if listed is None
        else [gpu for gpu in listed.split(",") if gpu]
    )
