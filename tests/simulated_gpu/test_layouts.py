"""Refits between layouts: from real trainers on two GPUs, over NCCL, to an engine that is cut over two others.

Each is taken twice: with what is queued done at once, and as late as may be. All tensors, digests and numbers of the
training steps between are the same to the bit.
"""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore, Store

from tandem.common.worker_shards import worker_shard_names
from tandem.config import Config
from tandem.refit import layout
from tandem.refit.adapters.catalogue import read_shape
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.digests.comparison import Digests, compare
from tandem.refit.layout import Layout
from tandem.refit.planner import plan
from tandem.refit.transports.meeting import GroupStore
from tandem.refit.weights import Weights, device_name, host_name
from tandem.trainer.backends import make_backend
from tests.harness.processes.stream_processes import views
from tests.harness.trainers import trainer_harness
from tests.harness.trainers.megatron_harness import TP2, config_for, make_checkpoint, tensors_in
from tests.harness.trainers.trainer_harness import make_batch, make_config, run_ranks, train_on
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]

NUM_TRAINERS, NUM_WORKERS, NUM_STEPS = 2, 2, 2
TRAINERS = [f"trainer-{rank}" for rank in range(NUM_TRAINERS)]
WORKERS = worker_shard_names("rollout-0", NUM_WORKERS)
TIMEOUT_S = 90.0

Found = tuple[Layout, list[Digests], list[dict[str, NDArray[np.uint8]]], list[dict[str, float]]]
"""Of a member: its layout; by version, its digests, an engine's storages, and a trainer's metrics."""


@pytest.fixture(scope="module", autouse=True)
def rank_server() -> None:
    """Start the process that ranks are forked from before a test could count it among what the test left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or what it imports would begin to use a GPU
        trainer_harness.start_server()


def take_part(rank: int, config: Config, checkpoint: Path, dtype: str, folder: Path, is_late: bool) -> Found:
    """Be a trainer or a worker of the engine, each on a GPU of its own, for some versions."""
    os.environ |= {"SIMULATED_GPU_COUNT": "4", "SIMULATED_GPU_PEERS": "0", "SIMULATED_GPU_LATE": str(int(is_late))}
    os.environ["SIMULATED_GPU_CARRIED"] = str(folder / "carried")
    ctypes.CDLL("libcuda.so.1").simulated_gpu_read_environment()
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    (store,) = trainer_harness.STORE
    torch.cuda.set_device(rank)
    backend: Any = None
    if rank < NUM_TRAINERS:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=PrefixStore("trainers", store), rank=rank, world_size=NUM_TRAINERS
        )
        backend = make_backend(config, checkpoint=None)
        holder = backend.weights()
    else:
        holder = engine_worker(rank - NUM_TRAINERS, checkpoint, dtype)
    meet(rank, holder, store)
    digests, storages, metrics = [], [], []
    for version in range(NUM_STEPS + 1):
        if version and backend is not None:
            metrics.append(train_on(backend, make_batch(seed=version), config).metrics)
        holder.apply(version, TIMEOUT_S, ())
        task = holder.digest_task(None)
        task.advance(math.inf)
        digests.append(task.result())
        if backend is None:
            held = {name: tensor.cpu().view(torch.uint8).numpy() for name, tensor in holder.storages.items()}
            storages.append(held)
        else:
            backend.save(folder / str(version)).num_bytes.result(TIMEOUT_S)
    dist.barrier() if backend is not None else None
    holder.close()
    return holder.layout, digests, storages, metrics


def engine_worker(rank: int, checkpoint: Path, dtype: str) -> Weights:
    """Hold what a worker of vLLM holds that is cut in two, with bytes that no weight has."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = read_shape(checkpoint).cast(dtype)
    described = Vllm(tp=NUM_WORKERS).layout(model, rank, host_name(), device_name(device))
    size = getattr(torch, dtype).itemsize
    storages = {
        each.name: torch.full((each.num_bytes // size,), math.nan, dtype=getattr(torch, dtype), device=device)
        for each in described.storages
    }
    return Weights(described, storages)


def meet(rank: int, holder: Weights, store: Store) -> None:
    """Plan with all others, and connect."""
    names = [*TRAINERS, *WORKERS]
    told = PrefixStore("layouts", store)
    told.set(names[rank], layout.encode(holder.layout))
    layouts = {name: layout.decode(told.get(name)) for name in names}
    sources, destinations = ({name: layouts[name] for name in side} for side in (TRAINERS, WORKERS))
    made = plan(sources, destinations, allow_alias=False)
    assert {transfer.transport for program in made.programs.values() for transfer in program.receives} == {"stream"}
    assert {transfer_group.device_type for transfer_group in made.transfer_groups} == {"cuda"}
    holder.install([made.programs[names[rank]]])
    for transfer_group in made.transfer_groups:
        holder.connect(transfer_group, GroupStore("127.0.0.1", store.port, "refit"), TIMEOUT_S)  # type: ignore[attr-defined]


def scene(config: Config, checkpoint: Path, dtype: str, folder: Path, is_late: bool) -> list[Found]:
    """Refit the engine to each version; compare all that it holds with what trainers save, and the digests."""
    folder.mkdir()
    found: list[Found] = run_ranks(
        NUM_TRAINERS + NUM_WORKERS,
        take_part,
        config,
        checkpoint,
        dtype,
        folder,
        is_late,
        deadline_s=200.0,
        are_group=False,
    )
    trainers, workers = found[:NUM_TRAINERS], found[NUM_TRAINERS:]
    for version in range(NUM_STEPS + 1):
        saved = tensors_in(folder / str(version) / "policy")
        seen = set()
        for described, _, storages, _ in workers:
            held = {name: torch.from_numpy(bytes_) for name, bytes_ in storages[version].items()}
            for index, box, view in views(described, held):
                name = described.tensors[index].name
                assert torch.equal(view, saved[name][box].to(view.dtype)), f"{name} of version {version}"
                seen.add(name)
        assert seen == saved.keys()
        verdict = compare(
            {name: (each[0], each[1][version]) for name, each in zip(TRAINERS, trainers, strict=True)},
            {"rollout-0": {name: (each[0], each[1][version]) for name, each in zip(WORKERS, workers, strict=True)}},
        )
        assert not verdict.differences
        assert verdict.digest
    carried = {line.split()[0] for line in (folder / "carried").read_text().splitlines()}
    assert carried == {"nccl"}, "nothing else crosses between these GPUs"
    return found


@pytest.mark.parametrize(("trainers", "dtype"), [("FSDP2", "bfloat16"), ("Megatron", "float32")])
def test_an_engine_that_is_cut_in_two_holds_what_trainers_hold(trainers: str, dtype: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3")
    if trainers == "Megatron":
        pytest.importorskip("megatron.core")
        config = config_for(checkpoint, NUM_TRAINERS, TP2)
    else:
        config = make_config(checkpoint)
    at_once = scene(config, checkpoint, dtype, tmp_path / "at once", is_late=False)
    late = scene(config, checkpoint, dtype, tmp_path / "late", is_late=True)
    for now, later in zip(at_once, late, strict=True):
        assert now[3] == later[3], "a step's numbers differ where what it queued came late"
        assert all(map(np.array_equal, now[1], later[1]))
