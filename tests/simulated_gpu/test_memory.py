"""What trainers hold of a GPU, where it goes while others need it, and that nothing is lost on the way."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from tandem.common.memory import MemoryMeter
from tandem.common.messages import MemoryUse
from tandem.config import Config
from tandem.trainer.backends import make_backend
from tests.harness.trainers import trainer_harness
from tests.harness.trainers.megatron_harness import PLAIN, config_for
from tests.harness.trainers.trainer_harness import digest_of, make_batch, make_config, make_model, run_ranks, train_on
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]

NUM_RANKS, NUM_STEPS = 2, 2


class Trained(NamedTuple):
    """What a rank found."""

    metrics: list[dict[str, float]]
    digest: int
    num_parameters: int
    """Of those that this rank steps."""
    used: list[MemoryUse]
    """Of each step, as the run reports it."""
    held: dict[str, int]
    """Bytes of the device that the process holds, by what it has done."""


@pytest.fixture(scope="module", autouse=True)
def rank_server() -> None:
    """Start the process that ranks are forked from before a test could count it among what the test left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or what it imports would begin to use a GPU
        trainer_harness.start_server()


def held_bytes() -> int:
    """Return what the device says is taken, which is what this process has reserved: no other uses it."""
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.memory_reserved()
    return total - free


def train(rank: int, config: Config, offloads: bool) -> Trained:
    """Train on GPUs, and give back between two steps what only steps need."""
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    (store,) = trainer_harness.STORE
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=PrefixStore("own", store), rank=rank, world_size=NUM_RANKS)
    backend: Any = make_backend(config, checkpoint=None)
    backend.weights()
    meter, metrics, used, held = MemoryMeter(), [], [], {"built": held_bytes()}
    for step in range(NUM_STEPS):
        meter.begin()
        metrics.append(train_on(backend, make_batch(seed=step), config).metrics)
        used.append(meter.use())
        held["trained"] = held_bytes()
        if offloads:
            backend.offload()
            held["offloaded"] = held_bytes()
            assert torch.cuda.memory_allocated() < used[-1].held
            backend.reload()
    digest, shards = digest_of(backend), 1 if config.policy.megatron_cfg.enabled else NUM_RANKS
    num_parameters = backend.num_parameters // shards
    backend.close()
    return Trained(metrics, digest, num_parameters, used, held)


def offloading(config: Config) -> Config:
    """Return a configuration of Megatron-Core whose optimizer works in host memory; it cannot be saved."""
    policy, asked = config.policy, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    cfg = policy.megatron_cfg
    cfg = msgspec.structs.replace(cfg, optimizer={**cfg.optimizer, **asked})
    return msgspec.structs.replace(config, policy=msgspec.structs.replace(policy, megatron_cfg=cfg))


@pytest.mark.parametrize("backend", ["FSDP2", "Megatron"])
def test_what_is_offloaded_trains_as_what_is_not(backend: str, tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "model", hidden_size=256, intermediate_size=1024)
    if backend == "Megatron":
        pytest.importorskip("megatron.core")
        plain = config_for(checkpoint, NUM_RANKS, PLAIN)
        on_cpu = offloading(plain)
    else:
        plain = make_config(checkpoint)
        on_cpu = make_config(checkpoint, dtensor_cfg={"cpu_offload": True})
    ranks = partial(run_ranks, NUM_RANKS, train, deadline_s=90.0, are_group=False)
    expected, between, lasting = ranks(plain, False), ranks(plain, True), ranks(on_cpu, False)
    for one, *others in zip(expected, between, lasting, strict=True):
        for other in others:
            assert one.metrics == other.metrics
            assert one.digest == other.digest
        assert one.used == others[0].used
        state = 2 * 4 * one.num_parameters  # two moments in float32
        assert others[0].held["offloaded"] < one.held["trained"] - 0.9 * state
        assert others[1].held["trained"] < one.held["trained"] - 0.9 * state
        for each in (one, *others):
            assert each.used[-1].held <= each.used[-1].peak <= each.held["trained"]
        assert one.used[-1].held > 0.9 * (state + 4 * one.num_parameters), "parameters, and what is kept of them"
