"""Decide how many threads a process computes with, and in what order its sums are taken."""

from __future__ import annotations

import os
from typing import Literal

from tandem.common.errors import ConfigError
from tandem.config import Config

_MOST_A_CORE = 16
"""Threads of one process: more than one may be of use where the configuration is written for a larger machine."""


def limit_threads(config: Config, kind: Literal["trainers", "rollouts"]) -> None:
    """Set torch's thread count for a process of this kind.

    The count is fixed for the run because floating-point sums depend on it.
    """
    import torch  # here, so that processes without torch can import this package

    refuse_threads(config)
    sum_reproducibly()
    torch.set_num_threads(num_threads(config, kind, len(os.sched_getaffinity(0))))


def sum_reproducibly() -> None:
    """Have MKL add in an order that does not depend on where its operands lie in memory; before its first product.

    On AMD's processors it does otherwise: a resumed run, whose tensors lie elsewhere, would differ in its last bits.
    Costs nothing that was measurable. What the user has set stays.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")


def refuse_threads(config: Config) -> None:
    """Raise `ConfigError` if a process is to have many more threads than this machine has cores."""
    threads, num_cores = config.cluster.threads_per_process, os.cpu_count() or 1
    if threads is not None and threads > _MOST_A_CORE * num_cores:
        raise ConfigError(
            f"cluster.threads_per_process: {threads} is more than {_MOST_A_CORE} for each of the {num_cores} cores of "
            "this machine"
        )


def num_threads(config: Config, kind: Literal["trainers", "rollouts"], num_cores: int) -> int:
    """Return ``cluster.threads_per_process``; if it is null, this process's share of the cores, or of each its workers.

    Training and generation take turns in synchronous mode, so each may use the whole machine; processes of one kind
    work at the same time and share it. How many there are is known where the coordinator launches them.
    """
    cluster = config.cluster
    if cluster.threads_per_process is not None:
        return cluster.threads_per_process
    if isinstance(cluster.launch, str):
        num_all = config.num_trainers if kind == "trainers" else cluster.rollouts
        num_here = num_all if cluster.launch == "all" else 1
    else:
        num_here = getattr(cluster.launch, kind)
    if kind == "rollouts" and config.policy.generation.backend == "vllm":
        num_here *= config.policy.generation.vllm_cfg.num_workers
    return max(1, num_cores // max(1, num_here))
