"""The options of the policy-gradient loss through whole training steps: the same however a batch is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.common.batch import TrainingBatch
from tandem.common.config import Config
from tandem.trainer import step
from tandem.trainer.backends.dtensor import DTensorBackend
from tests.integration.trainer_harness import make_batch, make_config, make_model, run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-6
SHAPES = [(1, 4), (1, 1), (2, 2)]
"""Ranks, and sequences of a micro-batch."""

GSPO = {
    "sequence_level_importance_ratios": True,
    "token_level_loss": False,
    "ratio_clip_min": 0.01,
    "ratio_clip_max": 0.02,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 2.0,
}
CISPO = {
    "use_cispo": True,
    "ratio_clip_min": 0.05,
    "ratio_clip_max": 0.05,
    "use_on_policy_kl_approximation": True,
    "reference_policy_kl_penalty": 0.1,
    "kl_output_clamp_value": 10.0,
}
RLOO = {
    "disable_ppo_ratio": True,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio": 1.1,
    "truncated_importance_sampling_ratio_min": 0.5,
}
KL_IN_REWARD = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"}


def configure(model: Path, loss: dict[str, Any], micro_batch: int, global_batch: int) -> Config:
    """KL in the reward comes with Reinforce++."""
    return make_config(
        model,
        loss=loss,
        estimator="reinforce_plus_plus" if "use_kl_in_reward" in loss else "grpo",
        train_micro_batch_size=micro_batch,
        train_global_batch_size=global_batch,
    )


def train_rank(rank: int, config: Config, batches: list[TrainingBatch], folder: Path) -> Any:
    backend = DTensorBackend(config, checkpoint=None)
    metrics = [step.train(backend, batch, config).metrics for batch in batches]
    backend.save(folder)
    return metrics


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loss", [GSPO, CISPO, RLOO, KL_IN_REWARD], ids=["gspo", "cispo", "rloo", "reinforce++"])
def test_ranks_and_micro_batches_make_no_difference(tmp_path: Path, loss: dict[str, Any]) -> None:
    model = make_model(tmp_path / "model")
    batches = [make_batch(seed=1), make_batch(seed=2)]
    found = []
    for number, (num_ranks, micro_batch) in enumerate(SHAPES):
        config = configure(model, loss, micro_batch, global_batch=4)  # so that ratios are not all one
        folder = tmp_path / str(number)
        found.append((run_ranks(num_ranks, train_rank, config, batches, folder)[0], weights_of(folder)))
    metrics, weights = found[0]
    for other_metrics, other_weights in found[1:]:
        for one, other in zip(metrics, other_metrics, strict=True):
            assert other == pytest.approx(one, rel=TOLERANCE, abs=TOLERANCE)
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=TOLERANCE)


def test_reinforce_plus_plus_against_a_plain_loop(tmp_path: Path) -> None:
    """The second step: after the first, policy and reference differ."""
    folder = make_model(tmp_path / "model")
    config = configure(folder, KL_IN_REWARD, micro_batch=2, global_batch=8)
    batches = [make_batch(seed=1), make_batch(seed=2)]
    run_ranks(1, train_rank, config, batches[:1], tmp_path / "first")
    (metrics,) = run_ranks(1, train_rank, config, batches, tmp_path / "second")

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    policy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "policy")
    batch = batches[1]
    ends = np.cumsum(batch.lengths_S)
    logprobs, advantages = [], []
    for row, (length, end) in enumerate(zip(batch.lengths_S, ends, strict=True)):
        token_ids = torch.from_numpy(batch.token_ids_T[end - length : end].astype(np.int64))
        mask = torch.from_numpy(batch.loss_mask_T[end - length : end])[1:]
        both = []
        for model in (policy, reference):
            logits_TV = model(input_ids=token_ids[None]).logits[0, :-1]
            both.append(logits_TV.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0][mask])
        logprobs.append(both[0])
        advantages.append(float(batch.advantages_S[row]) - 0.5 * (both[0] - both[1]).detach())
    policy_K, advantages_K = torch.cat(logprobs), torch.cat(advantages)
    normalised_K = (advantages_K - advantages_K.mean()) / advantages_K.std(correction=0)
    loss = -(normalised_K * (policy_K - policy_K.detach()).exp()).mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).norm()
    assert metrics[1]["loss"] == pytest.approx(float(loss.detach()), abs=TOLERANCE)
    assert metrics[1]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert metrics[1]["kl"] != 0, "the example's policy has moved away from its reference"
