"""Recipes of `tinker-cookbook`, unchanged, with a model and data of a Hub on loopback: losses fall, rewards rise."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.hub_server import hub_server
from tests.harness.runs.of_hub import set_environment
from tests.harness.runs.running import BIN, TIMEOUT_S, merged
from tests.harness.tinker import cookbook
from tests.harness.tinker.server import CONFIG, Served, serving

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tinker_cookbook") is None, reason="tinker-cookbook is not installed"
)
_OVER = {
    "policy": {
        "model_name": cookbook.MODEL,
        "max_total_sequence_length": 256,
        "train_micro_batch_size": 16,
        "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 32}},  # the rank that the recipes ask for
        "generation": {"transformers_cfg": {"num_slots": 64}},
    },
    "cluster": {"trainers": 1},
}
_GSM8K = "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
"""The data of ``rl_basic``, named once more so that its sizes can be given."""


def run(server: Served, recipe: str, *settings: str) -> list[dict[str, float]]:
    """Run a recipe as its page says, and return its metrics by step."""
    folder = Path(recipe)
    words = [sys.executable, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={folder}"]
    words += [f"base_url={server.url}", f"model_name={cookbook.MODEL}", *settings]
    environment = {**os.environ, "TINKER_API_KEY": server.keys["me"], "TINKER_TELEMETRY": "0"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, f"{ended.stderr}\n{server.command.output()}"
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_dpo_keeps_its_reference_while_newer_weights_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub:
        cookbook.fill(hub)
        set_environment(monkeypatch, hub, Path("hf").absolute())
        config = Path("tinker.yaml")
        config.write_text(yaml.safe_dump(merged(CONFIG, _OVER)))
        with serving(config, command=BIN / "coordinator") as server:
            settings = [
                "renderer_name=role_colon",
                "batch_size=16",
                "learning_rate=1e-3",
                "max_length=64",
                "max_steps=21",
            ]
            steps = run(server, "preference.dpo.train", *settings)  # publishes for evaluation, and to save
    first, *_, last = [step for step in steps if "dpo_loss" in step]
    assert first["dpo_loss"] == pytest.approx(math.log(2), abs=1e-6), "the policy is its reference"
    assert (first["margin"], first["chosen_reward"]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert last["dpo_loss"] < 0.5 * first["dpo_loss"], steps
    assert last["chosen_reward"] > 0 > last["rejected_reward"]
    assert last["accuracy"] == 1.0
    assert [step["test/nll"] != steps[0]["test/nll"] for step in steps if "test/nll" in step] == [False, True, True]


def test_recipes_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub:
        cookbook.fill(hub)
        set_environment(monkeypatch, hub, Path("hf").absolute())
        config = Path("tinker.yaml")
        config.write_text(yaml.safe_dump(merged(CONFIG, _OVER)))
        with serving(config, command=BIN / "coordinator") as server:
            steps = run(server, "sl_loop", "batch_size=16", "learning_rate=5e-3", "save_every=4", "max_steps=6")
            losses = [step["train_mean_nll"] for step in steps]
            assert losses[-1] < 0.8 * losses[0], losses
            settings = ["batch_size=8", "group_size=8", "learning_rate=2e-3", "max_tokens=16", "max_steps=6"]
            steps = run(server, "rl_loop", "loss_fn=importance_sampling", "save_every=4", *settings)
            rewards = [step["reward/total"] for step in steps]
            assert rewards[-1] > rewards[0] + 0.25, rewards
            of_data = f"batch_size=8 group_size=8 model_name_for_tokenizer={cookbook.MODEL} renderer_name=role_colon"
            settings = [_GSM8K, *(f"dataset_builder.{each}" for each in of_data.split()), *settings[2:]]
            steps = run(server, "rl_basic", *settings)
            rewards = [step["env/all/reward/total"] for step in steps[:-1]]  # the last is of the end
            assert rewards[-1] > rewards[0] + 0.25, rewards
