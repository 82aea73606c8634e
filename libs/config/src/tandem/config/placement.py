"""Decide which GPUs of the cluster a process takes.

GPUs are counted over all nodes, and every node has ``cluster.gpus_per_node`` of them: number 9 is the second of the
second node where there are eight. Trainers take one each, from the first on, those of models with processes of their
own after the policy's. Engines take as many as each needs: the policy's where training and generation take turns, where
they do not those that are set aside for generation. Reward models have the last ones of a single node, if any are set
aside for them, and else share those of their engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the configuration's own checks import this module, and its schema comes with them
    from tandem.config.schema import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"
VISIBLE_TO_REWARD_MODELS = "TANDEM_REWARD_MODEL_DEVICES"
"""What `VISIBLE` is to be in each reward model of a rollout process: a JSON object, by its name in ``env``."""


def first_gpu_of_engines(config: Config) -> int:
    """Return the number of the GPU that generation begins with."""
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled:
        return 0
    if cluster.num_nodes > 1 and colocated.resources.num_nodes is not None:
        return (cluster.num_nodes - colocated.resources.num_nodes) * cluster.gpus_per_node
    if cluster.num_nodes == 1 and colocated.resources.gpus_per_node is not None:
        return cluster.gpus_per_node - gpus_of_reward_models(config) - colocated.resources.gpus_per_node
    return config.num_trainers


def gpus_per_engine(config: Config) -> int:
    """Return how many GPUs one engine takes: none if it is the embedded one, which runs on the CPU."""
    generation = config.policy.generation
    return generation.vllm_cfg.num_workers if generation.backend == "vllm" else 0


def gpus_of_reward_models(config: Config) -> int:
    """Return how many GPUs, the last of a single node, are set aside for reward models."""
    if config.cluster.num_nodes > 1 or not config.cluster.gpus_per_node:
        return 0
    return sum(entry.resources.gpus_per_node for entry in config.reward_models.values())


def visible_to_reward_models(config: Config, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the value of `VISIBLE` for each reward model beside engine `index`: one of its own GPUs, or its first.

    Each has those that are set aside for it. What `environment` says is visible is what there is, before
    `visible_to_engine` turns it.
    """
    gpus, aside = _gpus(config, environment), gpus_of_reward_models(config)
    shared = visible_to_engine(config, index, environment).partition(",")[0]
    first, found = len(gpus) - aside, dict[str, str]()
    for name, entry in config.reward_models.items():
        own = entry.resources.gpus_per_node if aside and len(gpus) > aside else 0
        found[name] = gpus[first + index % own] if own else shared
        first += own
    return found


def visible_to_engine(config: Config, index: int, environment: Mapping[str, str]) -> str:
    """Return the value of `VISIBLE` for engine `index`: its own GPUs first, in a circle.

    The others of its node stay visible, because memory can only be opened on a GPU that is. What `environment` says is
    visible is what there is.
    """
    number = first_gpu_of_engines(config) + index * gpus_per_engine(config)
    gpus = _gpus(config, environment)
    first = number % max(1, len(gpus))
    return ",".join(gpus[first:] + gpus[:first])


def _gpus(config: Config, environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs of the node, by the names that `VISIBLE` has for them."""
    said = environment.get(VISIBLE)
    return [*map(str, range(config.cluster.gpus_per_node))] if said is None else [gpu for gpu in said.split(",") if gpu]
