"""Decide which GPUs of the cluster a process takes.

GPUs are counted over all nodes, and every node has ``cluster.gpus_per_node`` of them: number 9 is the second of the
second node where there are eight. Trainers take one each, from the first on. Engines take as many as each needs: the
same ones where training and generation take turns, where they do not those that are set aside for generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the configuration's own checks import this module, and its schema comes with them
    from tandem.common.config.schema import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"


def first_gpu_of_engines(config: Config) -> int:
    """Return the number of the GPU that generation begins with."""
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled:
        return 0
    if cluster.num_nodes > 1 and colocated.resources.num_nodes is not None:
        return (cluster.num_nodes - colocated.resources.num_nodes) * cluster.gpus_per_node
    if cluster.num_nodes == 1 and colocated.resources.gpus_per_node is not None:
        return cluster.gpus_per_node - colocated.resources.gpus_per_node
    return cluster.trainers


def gpus_per_engine(config: Config) -> int:
    """Return how many GPUs one engine takes: none if it is the embedded one, which runs on the CPU."""
    generation = config.policy.generation
    return generation.vllm_cfg.num_workers if generation.backend == "vllm" else 0


def visible_to_engine(config: Config, index: int, environment: Mapping[str, str]) -> str:
    """Return the value of `VISIBLE` for engine `index`: its own GPUs first, in a circle.

    The others of its node stay visible, because memory can only be opened on a GPU that is. What `environment` says is
    visible is what there is.
    """
    number = first_gpu_of_engines(config) + index * gpus_per_engine(config)
    said = environment.get(VISIBLE)
    gpus = list(map(str, range(config.cluster.gpus_per_node))) if said is None else [g for g in said.split(",") if g]
    first = number % max(1, len(gpus))
    return ",".join(gpus[first:] + gpus[:first])
