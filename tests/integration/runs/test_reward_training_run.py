"""A whole run that trains a reward model through the console command: pairs with margins from a file, two trainers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.runs.running import (
    coordinator,
    copy_examples,
    deterministic,
    pairs_of_sums,
    steps_of,
    weights_of,
    write_config,
    write_rows,
)

NUM_STEPS = 6
PAIRS = [pair | {"ahead": 0.25 * (pair["prompt"][0] > pair["prompt"][-1])} for pair in pairs_of_sums()]


def write_pairs() -> None:
    """Write pairs to train on, and to hold out."""
    write_rows("pairs", PAIRS[24:])
    write_rows("held_out", PAIRS[:24])


RM: dict[str, Any] = {
    "algorithm": "rm",
    "rm": {"max_num_epochs": 9, "max_num_steps": NUM_STEPS, "val_period": 3, "val_at_start": True},
    "policy": {
        "train_micro_batch_size": 4,
        "optimizer": {"kwargs": {"lr": 3e-3}},
        "reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"},
    },
    "data": {
        "train_data_path": "pairs.jsonl",
        "val_data_path": "held_out.jsonl",
        "margin_key": "ahead",
        "num_train": None,
        "num_validation": None,
    },
    "checkpointing": {"save_period": 3, "metric_name": "val:validation-default_loss"},
    "cluster": {"trainers": 2},
}


def test_a_reward_model_learns_preferences_and_resumes_to_the_bit() -> None:
    write_pairs()
    config = write_config(RM)
    whole = coordinator("up", config, "logger.log_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    steps = steps_of("whole")
    assert [step.step for step in steps] == list(range(NUM_STEPS + 1))
    for step in steps[1:]:
        assert all(math.isfinite(value) for value in step.metrics.values())
        assert {"loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean"} <= step.metrics.keys()
        assert step.metrics["num_valid_samples"] == 16, "pairs"
    margins = [json.loads(line)["ahead"] for line in Path("held_out.jsonl").read_text().splitlines()]
    first = sum(math.log(1 + math.exp(margin)) for margin in margins) / len(margins)
    assert steps[0].metrics["val_loss"] == pytest.approx(first, abs=1e-5), "all scores are zero"
    last = steps[-1].metrics
    assert last["val_accuracy"] > 0.9
    assert last["val_loss"] < first
    assert last["val_rewards_chosen_mean"] > last["val_rewards_rejected_mean"]
    assert '"rewards_chosen_mean"' in Path("whole/report.html").read_text()

    scores = scores_with_transformers(Path("whole/checkpoints/step_6/policy"))
    held_out = [json.loads(line) for line in Path("held_out.jsonl").read_text().splitlines()]
    for kind in ("chosen", "rejected"):
        mean = sum(scores[pair["prompt"], kind] for pair in held_out) / len(held_out)
        assert mean == pytest.approx(last[f"val_rewards_{kind}_mean"], abs=1e-5)

    stopped = coordinator("up", config, "rm.max_num_steps=3")
    assert stopped.returncode == 0, stopped.stderr
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert weights_of("run/checkpoints/step_6") == weights_of("whole/checkpoints/step_6")
    for again, uninterrupted in zip(steps_of("run")[4:], steps[4:], strict=True):
        assert deterministic(again.metrics) == deterministic(uninterrupted.metrics)


def scores_with_transformers(folder: Path) -> dict[tuple[str, str], float]:
    """Return the score of every response as whoever has nothing but Transformers would compute it, in one batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    keys = [(pair["prompt"], kind) for pair in PAIRS for kind in ("chosen", "rejected")]
    conversations = [
        [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[kind]}]
        for pair in PAIRS
        for kind in ("chosen", "rejected")
    ]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False)
    inputs = tokenizer(texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
    return dict(zip(keys, scores.tolist(), strict=True))


def test_the_example_runs() -> None:
    copy_examples()
    ended = coordinator("up", "examples/arithmetic_rm.yaml", "rm.max_num_steps=2")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    assert [step.step for step in steps_of("results/arithmetic_rm")] == [0, 1, 2]
    assert steps_of("results/arithmetic_rm")[-1].metrics["num_valid_samples"] == 64
