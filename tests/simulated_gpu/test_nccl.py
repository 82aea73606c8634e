"""What stands in for NCCL: operations of one communicator come in the order in which they were queued."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]

NUM_RANKS, NUM_ROUNDS, NUM = 2, 40, 50_000


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


def test_operations_of_two_streams_do_not_mix(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=gather_and_scatter, args=(rank, str(tmp_path / "meeting"))) for rank in range(NUM_RANKS)
    ]
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
