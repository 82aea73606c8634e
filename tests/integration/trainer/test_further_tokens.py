"""A checkpoint with layers that predict later tokens (multi-token prediction) is trained without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config import Config
from tests.harness.trainers import megatron_harness
from tests.harness.trainers.reference import trained_weights
from tests.harness.trainers.trainer_harness import begin, make_config, make_groups, make_model, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(2)]
MEGATRON = {"enabled": True, "optimizer": megatron_harness.OPTIMIZER, "mtp_num_layers": 1}


def train(rank: int, config: Config, folder: Path) -> list[dict[str, float]]:
    backend, _ = begin(rank, config)
    metrics = [train_on(backend, batch, config).metrics for batch in BATCHES]
    backend.save(folder).num_bytes.result()
    return metrics


@pytest.mark.parametrize("policy", [{}, {"megatron_cfg": MEGATRON}], ids=["DTensor", "Megatron-Core"])
def test_layers_that_predict_later_tokens_are_not_read(policy: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain = make_model(tmp_path / "plain", "glm4_moe", num_experts_per_tok=2)
    further = make_model(tmp_path / "further", "glm4_moe", num_experts_per_tok=2)
    settings = json.loads((further / "config.json").read_text())
    beyond = settings["num_hidden_layers"]
    tensors = load_file(further / "model.safetensors")
    last = {name: each for name, each in tensors.items() if name.startswith(f"model.layers.{beyond - 1}.")}
    renamed = {name.replace(f".{beyond - 1}.", f".{beyond}.", 1): each.clone() for name, each in last.items()}
    own = {f"model.layers.{beyond}.eh_proj.weight": torch.zeros(settings["hidden_size"], 2 * settings["hidden_size"])}
    save_file({**tensors, **renamed, **own}, further / "model.safetensors", {"format": "pt"})
    (further / "config.json").write_text(json.dumps({**settings, "num_nextn_predict_layers": 1}))

    found = {}
    for model in (plain, further):
        folder = tmp_path / f"trained {model.name}"
        folder.mkdir()
        config = make_config(model, **policy)
        (metrics,) = run_ranks(1, train, config, folder)
        found[model.name] = metrics, trained_weights(folder)
    assert found["plain"][0] == found["further"][0]
    assert found["plain"][1].keys() == found["further"][1].keys()
    assert all(torch.equal(found["plain"][1][name], each) for name, each in found["further"][1].items())
