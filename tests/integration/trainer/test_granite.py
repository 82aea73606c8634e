"""Granite scales its embeddings, residuals, attention and logits: engine, trainer and Hugging Face agree on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.samples.batch import SampleBatch
from tandem.trainer.batching.shard import pad
from tandem.trainer.models import has_linear_head
from tandem.trainer.scorers.scorer import TokenScorer
from tests.harness.runs.running import coordinator, steps_of, write_config
from tests.unit.engine_harness import make_engine, make_model, random_prompts, reference_logprobs, request, run_all

MULTIPLIERS: dict[str, Any] = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}


@pytest.mark.parametrize("logits_scaling", [1.0, 4.0])
def test_log_probabilities_agree(logits_scaling: float, tmp_path: Path) -> None:
    model = make_model("granite", tmp_path, **MULTIPLIERS, logits_scaling=logits_scaling)
    prompts = random_prompts(3)
    finished = run_all(make_engine(tmp_path, model), [request(index, prompt) for index, prompt in enumerate(prompts)])
    responses = [finished[index].token_ids_T for index in range(3)]
    batch = SampleBatch(
        lengths_S=np.array([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], dtype=np.int32),
        token_ids_T=np.concatenate([[*p, *r] for p, r in zip(prompts, responses, strict=True)]).astype(np.int32),
        loss_mask_T=np.concatenate(
            [[False] * len(p) + [True] * len(r) for p, r in zip(prompts, responses, strict=True)]
        ),
        generation_logprobs_T=np.zeros(sum(len(p) + len(r) for p, r in zip(prompts, responses, strict=True)), "f4"),
        advantages_S=np.ones(3, dtype=np.float32),
        rewards_S=np.zeros(3, dtype=np.float32),
    )
    expected = [reference_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)]
    micro = pad(batch, range(3), divisible_by=1, device=torch.device("cpu"))
    scored_BT, *_ = TokenScorer(model, 1.0, linear_head=has_linear_head(model))(micro)
    for index in range(3):
        scored_T = scored_BT[index][micro.loss_mask_BT[index]].detach().numpy()
        np.testing.assert_allclose(finished[index].logprobs_T, expected[index], rtol=0, atol=1e-5)
        np.testing.assert_allclose(scored_T, expected[index], rtol=0, atol=1e-5)


def test_a_run_trains_it() -> None:
    granite = {"model_type": "granite", "head_dim": None, "logits_scaling": 1.0, **MULTIPLIERS}
    policy = {"new_model": {"config": granite}}
    path = write_config({"grpo": {"max_num_steps": 2}, "policy": policy})
    path.write_text(path.read_text().replace("      head_dim: null\n", ""))  # which it has not
    ended = coordinator("up", path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for step in steps_of():
        # The engine gives every token the probability that the trainer gives it.
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
        assert step.metrics["grad_norm"] > 0
