"""A checkpoint in float8 with block scales: trained as the weights that it stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config import Config
from tests.harness.runs.running import TINY, coordinator, steps_of, write_config
from tests.harness.trainers.reference import trained_weights
from tests.harness.trainers.trainer_harness import begin, make_config, make_groups, make_model, run_ranks, train_on

BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(2)]
BLOCK = 16


def quantise(whole: Path, quantised: Path) -> None:
    """Write a copy of a checkpoint in float8, and make the original what the copy stands for."""
    shutil.copytree(whole, quantised)
    plain, packed = load_file(whole / "model.safetensors"), {}
    for name, tensor in plain.items():
        if not name.endswith("_proj.weight"):
            packed[name] = tensor
            continue
        rows, columns = tensor.shape[0] // BLOCK, tensor.shape[1] // BLOCK
        blocks = tensor.reshape(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        packed[name] = values.reshape(tensor.shape)
        packed[f"{name}_scale_inv"] = scales
        plain[name] = (values.float() * scales[:, None, :, None]).reshape(tensor.shape)
    save_file(plain, whole / "model.safetensors", {"format": "pt"})
    save_file(packed, quantised / "model.safetensors", {"format": "pt"})
    settings = json.loads((whole / "config.json").read_text())
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (quantised / "config.json").write_text(json.dumps({**settings, "quantization_config": method}))


def train(rank: int, config: Config, folder: Path) -> list[dict[str, float]]:
    backend, _ = begin(rank, config)
    metrics = [train_on(backend, batch, config).metrics for batch in BATCHES]
    backend.save(folder).num_bytes.result()
    return metrics


@pytest.mark.usefixtures("rank_server")
def test_training_is_that_of_the_weights_it_stands_for(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole, quantised = make_model(tmp_path / "whole", hidden_size=64), tmp_path / "quantised"
    quantise(whole, quantised)
    found = {}
    for model in (whole, quantised):
        folder = tmp_path / f"trained {model.name}"
        folder.mkdir()
        config = make_config(model, trainers=2, dequantize_base_checkpoint=model == quantised)
        metrics, _ = run_ranks(2, train, config, folder)
        found[model.name] = metrics, trained_weights(folder)
        saved = json.loads((folder / "policy" / "config.json").read_text())
        assert saved.get("quantization_config") is None
    assert found["whole"][0] == found["quantised"][0]
    assert all(torch.equal(found["whole"][1][name], each) for name, each in found["quantised"][1].items())


def test_a_run_begins_with_it_and_engines_get_the_weights_as_they_are_trained() -> None:
    characters = TINY["policy"]["new_model"]["characters"]
    whole = make_model(Path("whole").absolute(), characters=characters)
    quantise(whole, Path("quantised"))
    over = {"policy": {"model_name": "quantised", "new_model": None}, "grpo": {"max_num_steps": 2}}
    config = write_config(over)
    refused = coordinator("up", config)
    assert refused.returncode != 0
    assert "it is quantised (fp8): dequantize_base_checkpoint reads float8 and MXFP4" in refused.stdout + refused.stderr
    ended = coordinator("up", config, "policy.dequantize_base_checkpoint=true", "logger.log_dir=whole_run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert max(step.metrics["token_mult_prob_error"] for step in steps_of("whole_run")) < 1.001
