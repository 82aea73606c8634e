"""Placement: which GPUs of the cluster a process uses.

GPUs are numbered over all nodes, each of which has ``cluster.gpus_per_node``: with eight, number 9 is the second GPU
of the second node. Trainers take one each, from the first on, followed by the processes of other models. Engines
take as many as each needs: the policy's GPUs if colocated, else those reserved for generation. Reward models use the
last GPUs of a single node if some are reserved for them, and otherwise share those of their engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the configuration's checks import this module, and importing the schema would be a circle
    from tandem.config.schema import Config

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
