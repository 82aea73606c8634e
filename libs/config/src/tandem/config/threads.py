"""Threads of a process, and the order of its sums."""

from __future__ import annotations

import os
from typing import Literal

from tandem.common.errors import ConfigError
from tandem.config import Config

_MOST_A_CORE = 16
"""Most threads of one process per core; more than one may be useful if the configuration is for a larger machine."""


def limit_threads(config: Config, kind: Literal["trainers", "rollouts"]) -> None:
    """Set torch's thread count for a process of this kind.

    The count is fixed for the run because floating-point sums depend on it.
    """
    import torch  # imported late, so that processes without torch can import this package

    refuse_threads(config)
    sum_reproducibly()
    torch.set_num_threads(count_threads(config, kind, len(os.sched_getaffinity(0))))


def sum_reproducibly() -> None:
    """Make MKL's order of addition independent of its operands' memory addresses; call before its first product.

    On AMD's processors it is not by default: a resumed run has its tensors elsewhere, and would differ in its last
    bits. The cost is not measurable. A value set by the user is kept.
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


def count_threads(config: Config, kind: Literal["trainers", "rollouts"], num_cores: int) -> int:
    """Return ``cluster.threads_per_process``, or else the cores per process, or per worker of an engine.

    In synchronous mode training and generation take turns, so each may use the whole machine. Processes of one kind
    work at the same time and share it. Their number is known if the coordinator launches them.
    """
    cluster = config.cluster
    if cluster.threads_per_process is not None:
        return cluster.threads_per_process
    if isinstance(cluster.launch, str):
        num_all = config.num_trainers if kind == "trainers" else cluster.rollouts
        num_here = num_all if cluster.launch == "all" else 1
    else:
        num_here = getattr(cluster.launch, kind)
    if kind == "rollouts":
        generation = config.policy.generation
        num_here *= generation.kind.num_workers(generation)
    return max(1, num_cores // max(1, num_here))
