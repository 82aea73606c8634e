"""Whole runs whose trainers share the experts of each layer, through the console command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.runs.running import coordinator, deterministic, steps_of, weights_of, write_config

SHARED: dict[str, Any] = {
    "grpo": {"max_num_steps": 2},
    "loss_fn": {"reference_policy_kl_penalty": 0.01},
    "policy": {
        "dtensor_cfg": {"expert_parallel_size": 2},
        "new_model": {
            "config": {
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
            }
        },
    },
    "cluster": {"trainers": 2, "rollouts": 2},
}


def write_shared() -> Path:
    config = write_config(SHARED)
    written = yaml.safe_load(config.read_text())
    del written["policy"]["new_model"]["config"]["head_dim"]  # which this type does not have
    config.write_text(yaml.safe_dump(written))
    return config


def test_a_resumed_run_equals_an_uninterrupted_one_also_on_other_ranks() -> None:
    config = write_shared()
    for arguments in (
        ("logger.log_dir=whole",),
        ("grpo.max_num_steps=1", "checkpointing.save_period=1"),
        ("--resume",),
    ):
        ended = coordinator("up", config, *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert weights_of("run/checkpoints/step_2") == weights_of("whole/checkpoints/step_2")
    resumed, uninterrupted = steps_of("run"), steps_of("whole")
    assert deterministic(resumed[1].metrics) == deterministic(uninterrupted[1].metrics)

    alone = "policy.dtensor_cfg.expert_parallel_size=1", "cluster.trainers=1", "logger.log_dir=whole"
    for others in (alone, ()):
        ended = coordinator("up", config, "grpo.max_num_steps=3", *others, "--resume")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "resuming at step 3" in ended.stdout
    by_one, shared = steps_of("whole")[2].metrics, steps_of("run")[2].metrics
    for name in ("loss", "grad_norm", "token_mult_prob_error"):
        assert by_one[name] == pytest.approx(shared[name], rel=1e-4, abs=1e-5), name
    assert shared["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
