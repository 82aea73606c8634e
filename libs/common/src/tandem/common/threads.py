"""How many threads a process computes with."""

from __future__ import annotations

import os

from tandem.common.config import Config


def limit_threads(config: Config) -> None:
    """Set torch's thread count from ``cluster.threads_per_process``; every core this process may use if it is null.

    Training and generation take turns in synchronous mode, so each may use the whole machine. The count is fixed for
    the run because floating-point sums depend on it.
    """
    import torch  # here, so that processes without torch can import this package

    torch.set_num_threads(config.cluster.threads_per_process or len(os.sched_getaffinity(0)))
