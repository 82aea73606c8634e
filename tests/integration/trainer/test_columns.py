"""Columns of a loss, each declared once, in whole runs: what engine, environment, coordinator and a scored model say is
the same number at the same token however a batch is laid out and shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.running import coordinator, merged, steps_of, write_config

LOSS = """
from tandem.trainer.losses import Report, aggregate


class Weighed:
    NAMES = ("difficulty", "apart", "version", "drift")

    def __init__(self, settings, counts, device):
        self.counts = counts
        self.report = Report(self.NAMES, counts.tokens, device)

    def __call__(self, batch, scores):
        columns, mask_BT = batch.columns, batch.loss_mask_BT
        padding_BT, prompts_BT = ~batch.attention_mask_BT, batch.attention_mask_BT & ~mask_BT
        assert (columns["versions"][padding_BT | prompts_BT] == -1).all(), "nobody made these"
        assert (columns["difficulty"][padding_BT] == 0.5).all(), "the fill"
        drift_BT = scores.logprobs - columns["start"]
        apart_BT = (columns["difficulty"] - columns["rewards"]).abs()
        self.report.add(mask_BT, columns["difficulty"], apart_BT, columns["versions"], drift_BT)
        weights_BT = columns["difficulty"] / (2 + columns["versions"])
        losses_BT = 0.1 * drift_BT**2 - batch.advantages_BT * weights_BT * scores.logprobs
        return aggregate(losses_BT, mask_BT, self.counts, token_level=True)
"""
JUDGE = """
from tandem.rollout.environments import Score


class Judge:
    def score(self, problem, response):
        worth = 0.25 + len(response) % 3
        return Score(reward=worth, correct=False, components={"difficulty": worth})
"""
COLUMNS = {
    "difficulty": {"source": "environment", "fill": 0.5},
    "versions": {"source": "engine"},
    "rewards": {"source": "coordinator"},
    "start": {"source": "reference"},
}
OWN: dict[str, Any] = {
    "grpo": {"max_num_steps": 2, "val_period": 0},
    "loss_fn": {"class": "weighed.Weighed", "columns": COLUMNS},
    "env": {"mine": {"class": "judging.Judge"}},
    "checkpointing": {"enabled": False},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"policy": {"share_prompts": False}},
    "prompts_shared": {},
    "packed": {"policy": {"sequence_packing": {"enabled": True}}},
    "padded_sharded": {"policy": {"share_prompts": False}, "cluster": {"trainers": 2}},
    "packed_sharded": {"policy": {"sequence_packing": {"enabled": True}}, "cluster": {"trainers": 2}},
    "megatron": {"policy": {"optimizer": None, "dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}},
}


@pytest.fixture(autouse=True)
def weighed() -> None:
    Path("weighed.py").write_text(LOSS)
    Path("judging.py").write_text(JUDGE)  # whose processes need no torch


def test_they_are_the_same_numbers_in_every_layout() -> None:
    found = {}
    for name, layout in LAYOUTS.items():
        ended = coordinator("up", write_config(merged(OWN, layout)), f"logger.log_dir={name}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        first, second = steps_of(name)
        for step in (first, second):
            assert step.metrics["version"] == step.step - 1, "the version that made each token"
            assert step.metrics["apart"] == 0, "each sample has the number that its own score gave"
        assert first.metrics["drift"] == pytest.approx(0, abs=1e-6), "the reference is where the policy began"
        if name != "megatron":  # whose default learning rate is smaller
            assert abs(second.metrics["drift"]) > 1e-4
        found[name] = first.metrics
    padded = found.pop("padded")
    assert padded["difficulty"] > 0.25
    for name, metrics in found.items():
        for metric in ("difficulty", "loss", "num_valid_tokens"):
            assert metrics[metric] == pytest.approx(padded[metric], rel=1e-5, abs=1e-6), (name, metric)
        if name != "megatron":
            assert metrics["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4), name


def test_one_that_the_environment_does_not_give_is_said_in_one_line() -> None:
    over = {"loss_fn": {"columns": {**COLUMNS, "dificulty": {"source": "environment"}}}}
    ended = coordinator("up", write_config(merged(OWN, over)))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line == (
        "error: loss_fn.columns.dificulty: environment 'mine' gave no such component, but difficulty; "
        "did you mean 'difficulty'?"
    )


SUPERVISED = """
from tandem.trainer.losses import Report, aggregate


class Near:
    def __init__(self, settings, counts, device):
        self.counts = counts
        self.report = Report(("drift",), counts.tokens, device)

    def __call__(self, batch, scores):
        drift_BT = scores.logprobs - batch.columns["start"]
        self.report.add(batch.loss_mask_BT, drift_BT)
        return aggregate(0.1 * drift_BT**2 - scores.logprobs, batch.loss_mask_BT, self.counts, token_level=True)
"""


def test_a_model_scores_for_an_algorithm_over_a_data_set_too() -> None:
    Path("near.py").write_text(SUPERVISED)
    over = {
        "algorithm": "sft",
        "sft": {"max_num_steps": 2, "val_period": 1, "val_global_batch_size": 8, "val_micro_batch_size": 8, "seed": 1},
        "loss_fn": {"class": "near.Near", "columns": {"start": {"source": "reference"}}},
        "checkpointing": {"enabled": False, "metric_name": "loss"},
    }
    ended = coordinator("up", write_config(over))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    begin, _, second = steps_of()
    assert begin.metrics["val_drift"] == pytest.approx(0, abs=1e-6)
    assert second.metrics["drift"] > 1e-4
    assert second.metrics["val_drift"] > 1e-4
