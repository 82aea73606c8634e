"""A sequence of 16k tokens over ranks that share it, with logits that never all exist, against plain Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer import scoring
from tests.harness.trainers import megatron_harness as megatron
from tests.harness.trainers.trainer_harness import VOCABULARY, make_config, make_model, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

LENGTH = 2**14
LOGITS = 2**14
"""That may exist at once on a rank: a twelfth of those of its share of the sequence."""
SIZES = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": LENGTH}
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
CP2 = {"context_parallel_size": 2}
BACKENDS: dict[str, dict[str, Any]] = {
    "dtensor": {"dtensor_cfg": CP2},
    "megatron": {"megatron_cfg": {"enabled": True, "optimizer": megatron.OPTIMIZER, **CP2}},
}


def long_batch() -> SampleBatch:
    """One sequence; all but its first tokens count."""
    random = np.random.default_rng(0)
    mask_T = np.arange(LENGTH) >= 100
    return SampleBatch(
        lengths_S=np.array([LENGTH], dtype=np.int32),
        token_ids_T=random.integers(3, VOCABULARY, LENGTH).astype(np.int32),
        loss_mask_T=mask_T,
        generation_logprobs_T=np.where(mask_T, -3.0, 0.0).astype(np.float32),
        advantages_S=np.ones(1, dtype=np.float32),
        rewards_S=np.zeros(1, dtype=np.float32),
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """Return a model, and what plain Hugging Face finds its loss and the norm of its gradient to be."""
    folder = make_model(tmp_path_factory.mktemp("alone") / "model", "qwen3", **SIZES, **ONE_HEAD)
    batch = long_batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    token_ids_T = torch.from_numpy(batch.token_ids_T.astype(np.int64))
    logprobs_TV = model(input_ids=token_ids_T[None]).logits[0, :-1].log_softmax(dim=-1)
    mask_T = torch.from_numpy(batch.loss_mask_T[1:])
    loss = -logprobs_TV.gather(1, token_ids_T[1:, None])[:, 0][mask_T].mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return folder, loss.item(), norm.item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_share_16k_tokens_find_the_loss_and_gradient_of_one(
    backend: str, alone: tuple[Path, float, float]
) -> None:
    folder, loss, norm = alone
    config = make_config(
        folder,
        algorithm="sft",
        trainers=2,
        **BACKENDS[backend],
        max_total_sequence_length=LENGTH,
        train_micro_batch_size=1,
        max_grad_norm=None,
    )
    for metrics, most_logits in run_ranks(2, train_rank, config, long_batch()):
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert LOGITS / 2 < most_logits <= LOGITS


def train_rank(rank: int, config: Config, batch: SampleBatch) -> tuple[dict[str, float], int]:
    """Train one step; return its metrics, and the most logits that were there at once."""
    numbers: list[int] = []
    compute = scoring.logits_of

    def count(*args: Any) -> torch.Tensor:
        logits = compute(*args)
        numbers.append(logits.numel())
        return logits

    scoring.logits_of, scoring._LOGITS = count, LOGITS
    metrics = train_on(megatron.make(config), batch, config).metrics
    return metrics, max(numbers)
