"""Distillation under Megatron-Core, student and teacher cut alike: the numbers of Hugging Face models in a process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config import Config
from tandem.samples.batch import Batch
from tests.harness.trainers.megatron_harness import CP2, OPTIMIZER, PP2, SP, TP2, make, make_checkpoint
from tests.harness.trainers.reference import assert_same_steps, trained_weights
from tests.harness.trainers.reference_distillation import plain_distillation
from tests.harness.trainers.trainer_harness import make_config, make_groups, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TOPK, TEMPERATURE = 5, 0.8
BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
REVERSE = {"kl_type": "reverse", "zero_outside_topk": True}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank, jsd": (1, {"kl_type": "jsd", "mixed_kl_weight": 0.3}, {}),
    "tensor and sequence parallel, over all tokens": (2, REVERSE, {**TP2, **SP}),
    "context parallel, over all tokens": (2, {**REVERSE, "kl_type": "mixed"}, CP2),
    "pipeline parallel, forward": (2, {"kl_type": "forward"}, PP2),
}
"""Ranks, and keys of ``loss_fn`` and ``megatron_cfg``."""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("student"), "llama")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another kind, whose output layer is its embedding."""
    return make_checkpoint(tmp_path_factory.mktemp("teacher"), "qwen2", seed=5)


def train_steps(rank: int, config: Config, batches: Sequence[Batch], folder: Path) -> list[dict[str, float]]:
    backend = make(config)
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    backend.save(folder).num_bytes.result()
    backend.close()
    return metrics


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_a_plain_loop(case: str, student: Path, teacher: Path, tmp_path: Path) -> None:
    num_ranks, loss, parallel = CASES[case]
    megatron = {"enabled": True, **parallel}
    config = make_config(
        student,
        algorithm="distillation",
        loss=loss,
        teacher={"model_name": str(teacher), "megatron_cfg": megatron},
        topk=TOPK,
        temperature=TEMPERATURE,
        trainers=num_ranks,
        megatron_cfg={**megatron, "optimizer": OPTIMIZER},
    )
    expected = plain_distillation(
        student, [teacher], BATCHES, loss, topk=TOPK, temperature=TEMPERATURE, decays_vectors=False
    )
    metrics, *others = run_ranks(num_ranks, train_steps, config, BATCHES, tmp_path)
    assert all(each == metrics for each in others), "every rank reports the same"
    assert_same_steps(metrics, expected.steps, TOLERANCE)
    for name, tensor in trained_weights(tmp_path).items():
        torch.testing.assert_close(
            tensor, expected.weights[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
