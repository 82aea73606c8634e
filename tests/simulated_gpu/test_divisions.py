"""Models on Megatron-Core that divide two GPUs in different ways, over NCCL: the numbers of one process on a CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tests.harness.trainers import trainer_harness
from tests.harness.trainers.megatron_harness import OPTIMIZER, TP2, make, make_checkpoint
from tests.harness.trainers.reference import assert_same_steps
from tests.harness.trainers.reference_distillation import plain_distillation
from tests.harness.trainers.trainer_harness import make_config, make_groups, run_ranks, train_on
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]

BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(2)]
TOPK, TOLERANCE = 5, 1e-5
LOSS = {"kl_type": "forward"}


@pytest.fixture(scope="module", autouse=True)
def rank_server() -> None:
    """Start the process that ranks are forked from before a test could count it among what the test left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or what it imports would begin to use a GPU
        trainer_harness.start_server()


def train_steps(rank: int, config: Config, batches: Sequence[SampleBatch]) -> list[dict[str, float]]:
    """Train on a GPU of this rank's own."""
    os.environ["SIMULATED_GPU_COUNT"] = "2"
    ctypes.CDLL("libcuda.so.1").simulated_gpu_read_environment()
    torch.cuda.set_device(rank)
    (store,) = trainer_harness.STORE
    dist.init_process_group("cpu:gloo,cuda:nccl", store=PrefixStore("trainers", store), rank=rank, world_size=2)
    backend = make(config)
    assert backend.device.type == "cuda"
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    backend.close()
    return metrics


@pytest.mark.parametrize(
    ("of_student", "of_teacher"),
    [(TP2, {"tensor_model_parallel_size": 1}), ({}, TP2)],
    ids=["a tensor-parallel student", "a tensor-parallel teacher"],
)
def test_each_model_has_groups_of_its_own(
    of_student: dict[str, Any], of_teacher: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core")
    student, teacher = (make_checkpoint(tmp_path / name, "llama", seed=seed) for seed, name in enumerate("st"))
    config = make_config(
        student,
        algorithm="distillation",
        loss=LOSS,
        teacher={"model_name": str(teacher), "megatron_cfg": {"enabled": True, **of_teacher}},
        topk=TOPK,
        trainers=2,
        megatron_cfg={"enabled": True, **of_student, "optimizer": OPTIMIZER},
    )
    expected = plain_distillation(student, [teacher], BATCHES, LOSS, topk=TOPK, decays_vectors=False)
    metrics, others = run_ranks(2, train_steps, config, BATCHES, deadline_s=150.0, are_group=False)
    assert metrics == others
    assert_same_steps(metrics, expected.steps, TOLERANCE)
