"""Vision models on a GPU: the tower beside Megatron-Core or all by FSDP2, and positions that no kernel counts."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]

BACKENDS = ("dtensor", "megatron")


def train(name: str, family: str, folder: Path, told: Any) -> None:
    """Take a step on the GPU, and by plain Hugging Face on the CPU."""
    from tests.harness.trainers.megatron_harness import OPTIMIZER, make
    from tests.harness.trainers.reference import plain_numbers
    from tests.harness.trainers.trainer_harness import train_on
    from tests.harness.trainers.vision_harness import PlainVision, seeing_batch, vision_config
    from tests.harness.vision_models import write_vision_model

    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.FileStore(str(folder / "meeting"), 1), rank=0, world_size=1
    )
    torch.backends.cudnn.enabled = False  # it rounds the inputs of convolutions, and simulated GPUs have none
    packed = {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 768}
    model = write_vision_model(family, folder / "model")
    megatron = {"enabled": True, "optimizer": OPTIMIZER, "activation_checkpointing": True}
    own = {"megatron_cfg": megatron} if name == "megatron" else {"dtensor_cfg": {"activation_checkpointing": True}}
    config = vision_config(model, folder / "run", sequence_packing=packed, **own)
    batch = seeing_batch(config)
    decays = name == "dtensor"
    expected = plain_numbers(PlainVision(config, batch), [batch], temperature=1.0, kl=0.0, decays_vectors=decays)
    backend: Any = make(config)
    metrics = train_on(backend, batch, config).metrics
    told.send(((metrics["loss"], metrics["grad_norm"]), expected.steps[0]))
    backend.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_a_step_is_that_of_plain_hugging_face(family: str, name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(name, family, tmp_path, theirs))
    process.start()
    theirs.close()
    try:
        found, expected = ours.recv()
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    finally:
        process.join(60)
        process.kill()
        ours.close()
