"""Distillation under the DTensor backend: the numbers of Hugging Face models in one process, however work is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.reference import assert_same_steps, trained_weights
from tests.integration.reference_distillation import plain_distillation
from tests.integration.trainer_harness import evaluate_rank, make_config, make_groups, make_model, run_ranks, train_rank

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TOPK, TEMPERATURE = 5, 0.8
BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
LARGER = {"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 64}

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}}
BY_TOKENS = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 80}}
TP2 = {"dtensor_cfg": {"tensor_parallel_size": 2}}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank, mixed": (1, {"kl_type": "mixed", "mixed_kl_weight": 0.3}, {}, {}),
    "one rank, forward over all tokens": (1, {"kl_type": "forward", "zero_outside_topk": True}, {}, {}),
    "two ranks, reverse, a packed student": (2, {"kl_type": "reverse"}, PACKED, BY_TOKENS),
    "two ranks, jsd": (2, {"kl_type": "jsd", "mixed_kl_weight": 0.3}, {"share_prompts": False}, {}),
    "tensor parallel, reverse over all tokens": (2, {"kl_type": "reverse", "zero_outside_topk": True}, TP2, {}),
    "tensor parallel, jsd over all tokens": (2, {"kl_type": "jsd", "zero_outside_topk": True}, TP2, {}),
    "context parallel, mixed over all tokens": (
        2,
        {"kl_type": "mixed", "zero_outside_topk": True},
        {"dtensor_cfg": {"context_parallel_size": 2}},
        {},
    ),
}
"""Ranks, and keys of ``loss_fn``, ``policy`` and ``teacher``."""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("student"), "llama")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another kind and size, with the same tokens."""
    return make_model(tmp_path_factory.mktemp("teacher"), "qwen3", seed=5, **LARGER)


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_a_plain_loop(case: str, student: Path, teacher: Path, tmp_path: Path) -> None:
    num_ranks, loss, policy, others = CASES[case]
    config = make_config(
        student,
        algorithm="distillation",
        loss=loss,
        teacher={"model_name": str(teacher), **others},
        topk=TOPK,
        temperature=TEMPERATURE,
        trainers=num_ranks,
        **policy,
    )
    expected = plain_distillation(student, [teacher], BATCHES, loss, topk=TOPK, temperature=TEMPERATURE)
    (metrics, _), *others_metrics = run_ranks(num_ranks, train_rank, config, BATCHES, tmp_path)
    assert all(each == metrics for each, _ in others_metrics), "every rank reports the same"
    assert_same_steps(metrics, expected.steps, TOLERANCE)
    found = trained_weights(tmp_path)
    assert found.keys() == expected.weights.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected.weights[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert all(0 < each["topk_probability"] < 1 and each["teacher_entropy"] > 0 for each in metrics)


def test_recorded_text_is_learned_and_validated_in_the_same_way(student: Path, teacher: Path) -> None:
    config = make_config(
        student,
        algorithm="off_policy_distillation",
        loss={"kl_type": "forward"},
        teacher={"model_name": str(teacher)},
        topk=TOPK,
        trainers=2,
    )
    expected = plain_distillation(student, [teacher], BATCHES, {"kl_type": "forward"}, topk=TOPK)
    (metrics, _), _ = run_ranks(2, train_rank, config, BATCHES)
    assert_same_steps(metrics, expected.steps, TOLERANCE)
    (validated, _) = run_ranks(2, evaluate_rank, config, BATCHES[0])
    assert validated["loss"] == pytest.approx(expected.steps[0][0], abs=TOLERANCE)
