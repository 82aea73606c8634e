"""SFT on either backend against what Hugging Face's own models compute from labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends import make_backend
from tests.harness.trainers.megatron_harness import make_checkpoint
from tests.harness.trainers.trainer_harness import evaluate_on, make_config, make_groups, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

BATCH = make_groups(1, 1, 1, 1, 1, 1, 1, 1, seed=3)
"""Eight conversations, of which one has two turns."""

MEGATRON = {"enabled": True, "optimizer": {"optimizer": "adam", "lr": 1e-3}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batches": (1, {"train_micro_batch_size": 1}),
    "FSDP2, dynamic batches": (2, {"dynamic_batching": {"enabled": True}}),
    "TP2, packed": (2, {"dtensor_cfg": {"tensor_parallel_size": 2}, "sequence_packing": {"enabled": True}}),
    "Megatron-Core, TP2": (2, {"megatron_cfg": MEGATRON | {"tensor_model_parallel_size": 2}}),
    "Megatron-Core, PP2": (2, {"megatron_cfg": MEGATRON | {"pipeline_model_parallel_size": 2}}),
    "Megatron-Core, CP2, packed": (
        2,
        {"megatron_cfg": MEGATRON | {"context_parallel_size": 2}, "sequence_packing": {"enabled": True}},
    ),
}


def rank(rank: int, config: Config, batch: SampleBatch) -> tuple[dict[str, float], dict[str, float]]:
    """Evaluate, then train."""
    backend = make_backend(config, checkpoint=None)
    evaluated = evaluate_on(backend, batch, config)
    return evaluated, train_on(backend, batch, config).metrics


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float, float]:
    """A model, and the loss, gradient norm and accuracy that it gives itself, one conversation at a time."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    total, num_right = torch.zeros(()), 0
    for length, end in zip(BATCH.lengths_S, np.cumsum(BATCH.lengths_S), strict=True):
        token_ids = torch.from_numpy(BATCH.token_ids_T[end - length : end].astype(np.int64))
        counts = torch.from_numpy(BATCH.loss_mask_T[end - length : end])
        labels = torch.where(counts, token_ids, -100)
        output = model(token_ids[None], labels=labels[None], num_items_in_batch=int(BATCH.loss_mask_T.sum()))
        total = total + output.loss
        num_right += int((output.logits[0, :-1].argmax(dim=-1) == labels[1:]).sum())
    total.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return folder, float(total.detach()), float(norm), num_right / int(BATCH.loss_mask_T.sum())


@pytest.mark.parametrize(("num_ranks", "policy"), CASES.values(), ids=CASES)
def test_loss_gradient_and_accuracy_are_hugging_faces(
    num_ranks: int, policy: dict[str, Any], plain: tuple[Path, float, float, float]
) -> None:
    folder, loss, norm, accuracy = plain
    config = make_config(folder, algorithm="sft", temperature=0.3, trainers=num_ranks, **policy)
    for evaluated, trained in run_ranks(num_ranks, rank, config, BATCH):
        assert evaluated["loss"] == pytest.approx(loss, abs=1e-5)
        assert evaluated["num_valid_tokens"] == BATCH.loss_mask_T.sum()
        assert trained["loss"] == pytest.approx(loss, abs=1e-5)
        assert evaluated["token_accuracy"] == trained["token_accuracy"] == pytest.approx(accuracy, abs=1e-9)
        assert evaluated["entropy"] == pytest.approx(trained["entropy"], abs=1e-5)
        assert trained["grad_norm"] == pytest.approx(norm, rel=1e-5)
