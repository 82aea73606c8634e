"""A whole colocated run on one GPU: training and vLLM take turns, and weights cross through CUDA IPC."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.harness.runs.by_hand import refits_of
from tests.harness.runs.running import steps_of, typed, write_config
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

NUM_STEPS = 4
CONFIG: dict[str, Any] = {
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
    "policy": {
        "new_model": {"config": {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}},
        "precision": "bfloat16",
        "train_micro_batch_size": 4,
        "generation": {
            "backend": "vllm",
            "vllm_cfg": {"gpu_memory_utilization": 0.3, "enforce_eager": True},
            "colocated": {"enabled": True},
        },
        "optimizer": {"kwargs": {"lr": 1.0e-4}},
    },
    "refit": {"verify": "full"},
    "checkpointing": {"save_period": NUM_STEPS},
    "cluster": {"gpus_per_node": 1, "deadlines": {"build_s": 600.0}},
}
if IS_RUNNING:
    CONFIG["grpo"] |= {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}
    CONFIG["policy"]["train_global_batch_size"] = 8
    # Kernels are interpreted there: a digest takes ten seconds, and several times as long where others compute as well.
    CONFIG["cluster"] = {
        "gpus_per_node": 1,
        "heartbeat_timeout_s": 60.0,
        "deadlines": dict.fromkeys(("join_s", "build_s", "generate_s", "train_s", "refit_s"), 600.0),
    }
    CONFIG["policy"]["new_model"] = {
        "config": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 64}
    }


def test_training_and_generation_take_turns_on_one_gpu() -> None:
    ended = typed("coordinator", "up", str(write_config(CONFIG)), timeout_s=800.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = steps_of()
    assert [step.step for step in steps] == [*range(1, NUM_STEPS + 1)]
    for step in steps:
        # bfloat16 keeps 8 bits, and the kernels of the two sides add in another order.
        assert step.metrics["token_mult_prob_error"] < 1.05
        assert {"generation", "policy_training", "refit"} <= step.seconds.keys()
        asleep, awake = (step.metrics[f"memory_{phase}_engine_gb"] for phase in ("training", "generation"))
        assert asleep < 0.2 * awake, "what vLLM has unmapped is counted"
        reserved, used = (step.metrics[f"memory_training_trainer_{what}gb"] for what in ("reserved_", ""))
        assert reserved >= used > 0
    refits = refits_of()
    assert [refit.version for refit in refits] == [*range(NUM_STEPS + 1)], ended.stdout + ended.stderr
    for refit in refits:
        assert refit.digest, "what the engine held was not verified"
        assert not refit.quarantined
