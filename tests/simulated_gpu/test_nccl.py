"""What stands in for NCCL: operations of one communicator come in the order in which they were queued."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]

NUM_RANKS, NUM_ROUNDS, NUM = 2, 40, 50_000
NUM_ATTEMPTS = 10


def gather_and_scatter(rank: int, meeting: str) -> None:
    """Gather on one stream while the other one scatters, as FSDP2 does in a backward pass."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(meeting, NUM_RANKS)
    dist.init_process_group("nccl", rank=rank, world_size=NUM_RANKS, store=store)
    gathering, scattering = torch.cuda.Stream(), torch.cuda.Stream()
    for number in range(NUM_ROUNDS):
        own = torch.full((NUM,), number + rank, dtype=torch.float32, device="cuda")
        whole, share = torch.empty(NUM_RANKS * NUM, device="cuda"), torch.empty(NUM // NUM_RANKS, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(gathering):
            dist.all_gather_into_tensor(whole, own)
        with torch.cuda.stream(scattering):
            dist.reduce_scatter_tensor(share, own)
        torch.cuda.synchronize()
        assert whole.view(NUM_RANKS, NUM)[:, [0, -1]].tolist() == [[number] * 2, [number + 1] * 2]
        assert bool((share == 2 * number + 1).all())
    dist.destroy_process_group()


WAITS = ("the queue for what wrote the weights", "unpacking for the message", "the host for the queue")
"""Of a refit by a stream (`tandem.refit.transports.exchange`), in its order."""


def refit_without(rank: int, meeting: str) -> None:
    """Send weights that are the number of a refit to the other rank, with the calls of a refit but for one wait."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=NUM_RANKS, store=dist.FileStore(meeting, NUM_RANKS))
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    queue = torch.cuda.Stream()
    weights, message = (torch.zeros(NUM, device="cuda") for _ in range(2))
    wrong = dict.fromkeys((*WAITS, "nothing"), False)
    # A watchdog of torch's looks at each message now and then, which makes it arrive: often enough it looks later.
    for number, left_out in enumerate([*wrong] * NUM_ATTEMPTS, start=1):
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0:
            weights.fill_(number)
        if left_out != WAITS[0]:
            queue.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(queue):
            if rank == 0:
                message.copy_(weights.view(-1, 2).flip(1).view(-1))
            backend._start_coalescing()
            backend.send([message], 1, 0) if rank == 0 else backend.recv([message], 0, 0)
            work = backend._end_coalescing()
            if left_out != WAITS[1]:
                work.wait()
            if rank == 1:
                weights.copy_(message.view(-1, 2).flip(1).view(-1))
        if left_out != WAITS[2] or rank == 0:
            queue.synchronize()
        if rank == 1:
            wrong[left_out] |= not bool((weights == number).all())
    if rank == 1:
        assert wrong == {**dict.fromkeys(WAITS, True), "nothing": False}, wrong
    dist.destroy_process_group()


def test_each_wait_of_a_refit_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATED_GPU_LATE", "1")
    run(refit_without, tmp_path)


def test_operations_of_two_streams_do_not_mix(tmp_path: Path) -> None:
    run(gather_and_scatter, tmp_path)


def run(work: Callable[[int, str], None], tmp_path: Path) -> None:
    """Do something in each rank, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(rank, str(tmp_path / "meeting"))) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(100)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join(30)
