"""A whole run whose trainers are Megatron-Core's, through the console command."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.harness.runs.running import coordinator, deterministic, steps_of, weights_of, write_config

PIPELINE = {
    "policy": {
        "optimizer": None,
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {
            "enabled": True,
            "pipeline_model_parallel_size": 2,
            "optimizer": {"lr": 1.0e-3, "min_lr": 0.0},
            # Stretched over the run as it is now: the first part of the second run is shorter than the whole.
            "scheduler": {"lr_decay_style": "linear", "override_opt_param_scheduler": True},
        },
    },
    "cluster": {"trainers": 2},
}


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit() -> None:
    config = write_config(PIPELINE | {"grpo": {"max_num_steps": 2}})
    for arguments in (("logger.log_dir=whole",), ("grpo.max_num_steps=1",), ("--resume",)):
        ended = coordinator("up", config, *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resuming at step 2" in ended.stdout
    assert weights_of("run/checkpoints/step_2") == weights_of("whole/checkpoints/step_2")
    resumed, uninterrupted = steps_of("run"), steps_of("whole")
    assert [step.step for step in resumed] == [1, 2]
    assert deterministic(resumed[1].metrics) == deterministic(uninterrupted[1].metrics)
    assert [step.metrics["learning_rate"] for step in resumed] == pytest.approx([1.0e-3, 0.5e-3])
    for folder in ("run", "whole"):
        settings = yaml.safe_load(Path(folder, "config.yaml").read_text())["policy"]["megatron_cfg"]
        assert settings["train_iters"] == 2
