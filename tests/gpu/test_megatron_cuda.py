"""Megatron-Core on a GPU without Transformer Engine or Apex: what would be many passes over memory is one."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="which has its own"),
]


def look(folder: Path, told: Any) -> None:
    """Build a model's trainer, take a step, and say what is fused."""
    from tests.harness.trainers.megatron_harness import config_for, make, make_checkpoint
    from tests.harness.trainers.trainer_harness import make_batch, train_on

    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.FileStore(str(folder / "meeting"), 1), rank=0, world_size=1
    )
    config = config_for(make_checkpoint(folder / "model", "qwen3"), 1, {})
    backend: Any = make(config)
    train_on(backend, make_batch(), config)
    held = backend._held["policy", 0]
    fused = {group.get("fused") for part in held.optimizer.chained_optimizers for group in part.optimizer.param_groups}
    stand_ins = [name for name in sys.modules if "megatron.on_cpu" in name]
    told.send((fused, held.settings.transformer.gradient_accumulation_fusion, stand_ins))
    backend.close()
    dist.destroy_process_group()


def test_adam_and_the_sums_of_weight_gradients_are_fused_and_nothing_stands_in_for_cuda(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=look, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(400), "Megatron-Core's trainer took no step in time"
        assert ours.recv() == ({True}, True, [])
    finally:
        process.join(60)
        process.kill()
        ours.close()
