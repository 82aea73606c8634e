"""How many threads a process computes with."""

from __future__ import annotations

import os
from typing import Literal

from tandem.common.config import Config


def limit_threads(config: Config, kind: Literal["trainers", "rollouts"]) -> None:
    """Set torch's thread count for a process of this kind.

    The count is fixed for the run because floating-point sums depend on it.
    """
    import torch  # here, so that processes without torch can import this package

    torch.set_num_threads(num_threads(config, kind, len(os.sched_getaffinity(0))))


def num_threads(config: Config, kind: Literal["trainers", "rollouts"], num_cores: int) -> int:
    """Return ``cluster.threads_per_process``; if it is null, this process's share of the cores, or of each its workers.

    Training and generation take turns in synchronous mode, so each may use the whole machine; processes of one kind
    work at the same time and share it. How many there are is known where the coordinator launches them.
    """
    cluster = config.cluster
    if cluster.threads_per_process is not None:
        return cluster.threads_per_process
    if isinstance(cluster.launch, str):
        num_here: int = getattr(cluster, kind) if cluster.launch == "all" else 1
    else:
        num_here = getattr(cluster.launch, kind)
    if kind == "rollouts" and config.policy.generation.backend == "vllm":
        num_here *= config.policy.generation.vllm_cfg.num_workers
    return max(1, num_cores // max(1, num_here))
