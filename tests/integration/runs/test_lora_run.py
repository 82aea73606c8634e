"""A whole run that trains adapters, through the console command: resumed to the bit, merged, and used as a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.harness.runs.running import coordinator, deterministic, steps_of, write_config
from tests.harness.trainers.trainer_harness import make_model

SETTINGS: dict[str, Any] = {
    "algorithm": "sft",
    "sft": {"max_num_steps": 4, "val_period": 2},
    "policy": {
        "model_name": "base",
        "new_model": None,
        "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 2}},
        "optimizer": {"kwargs": {"lr": 1e-2}},
    },
    "checkpointing": {"save_period": 2},
    "cluster": {"trainers": 2},
}


def adapters_of(checkpoint: str) -> dict[str, bytes]:
    tensors = load_file(Path(checkpoint) / "policy" / "adapter_model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_a_run_of_adapters_resumes_to_the_bit_and_its_merged_model_is_trained_on() -> None:
    make_model(Path("base"))
    config = write_config(SETTINGS)
    whole = coordinator("up", config, "logger.log_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    steps = steps_of("whole")
    assert steps[-1].metrics["val_loss"] < steps[0].metrics["val_loss"]
    assert coordinator("up", config, "sft.max_num_steps=2").returncode == 0
    second = coordinator("up", config, "--resume")
    assert second.returncode == 0, second.stderr
    assert adapters_of("run/checkpoints/step_4") == adapters_of("whole/checkpoints/step_4")
    for resumed, uninterrupted in zip(steps_of("run")[3:], steps[3:], strict=True):
        assert deterministic(resumed.metrics) == deterministic(uninterrupted.metrics)

    merged = coordinator("merge", "run", "merged")
    assert merged.returncode == 0, merged.stderr
    assert "with its adapters merged" in merged.stdout
    # The merged model, before any step, is what the run ended with.
    whole_model = {"dtensor_cfg": {"lora_cfg": {"enabled": False}}, "model_name": "merged"}
    later = write_config({**SETTINGS, "policy": {**SETTINGS["policy"], **whole_model}}, "later.yaml")
    after = coordinator("up", later, "logger.log_dir=later", "sft.max_num_steps=1")
    assert after.returncode == 0, after.stderr
    assert steps_of("later")[0].metrics["val_loss"] == pytest.approx(steps[-1].metrics["val_loss"], abs=1e-5)

    # What is not there, or not that, is one line.
    base = json.loads(Path("run/checkpoints/step_4/policy/adapter_config.json").read_text())
    assert base["base_model_name_or_path"] == "base"
    refused = coordinator("up", config, "logger.log_dir=wrong", "policy.model_name=run/checkpoints/step_4/policy")
    assert refused.returncode == 1
    assert "error: policy.model_name: run/checkpoints/step_4/policy holds adapters, not a model" in refused.stderr
    shutil.copytree("run/checkpoints/step_4/policy", "damaged/policy")
    Path("damaged/policy/adapter_model.safetensors").unlink()
    lost = coordinator("merge", "damaged", "nothing")
    assert (lost.returncode, lost.stderr) == (1, "error: damaged/policy has no adapter_model.safetensors\n")
    assert not Path("nothing").exists()
