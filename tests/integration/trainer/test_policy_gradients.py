"""The options of the policy-gradient loss through whole training steps: the same however a batch is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends import make_backend
from tests.harness.trainers.reference import assert_same_steps, assert_same_weights, plain_grpo, trained_weights
from tests.harness.trainers.trainer_harness import ADAMW, make_batch, make_config, make_model, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-6
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 64}}
CONTEXT = {"dtensor_cfg": {"enabled": True, "context_parallel_size": 2}}
MEGATRON: dict[str, Any] = {
    "dtensor_cfg": {"enabled": False},
    "megatron_cfg": {
        "enabled": True,
        "tensor_model_parallel_size": 2,
        # The same optimizer, except that Megatron-Core decays no vectors.
        "optimizer": {"lr": ADAMW["lr"], "weight_decay": 0.0, "adam_eps": ADAMW["eps"]},
    },
}
SHAPES: list[tuple[int, dict[str, Any]]] = [
    (1, {"train_micro_batch_size": 4}),
    (2, {"train_micro_batch_size": 1}),
    (1, {"train_micro_batch_size": 1, **PACKED}),
    (2, {"train_micro_batch_size": 2, **CONTEXT}),
]
"""Ranks, and how they share a batch: its micro-batches, its rows, its sequences."""

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
VAPO = {"positive_example_nll_weight": 0.3}
ENTROPY = {"entropy_coef": 0.5}
KL_IN_REWARD = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"}


def configure(model: Path, loss: dict[str, Any], **policy: Any) -> Config:
    """KL in the reward comes with Reinforce++."""
    estimator = "reinforce_plus_plus" if "use_kl_in_reward" in loss else "grpo"
    return make_config(model, loss=loss, estimator=estimator, **policy)


def train_rank(rank: int, config: Config, batches: list[SampleBatch], folder: Path) -> Any:
    backend = make_backend(config, checkpoint=None)
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    backend.save(folder).num_bytes.result()
    return metrics


LOSSES = {"gspo": GSPO, "cispo": CISPO, "rloo": RLOO, "vapo": VAPO, "entropy": ENTROPY, "reinforce++": KL_IN_REWARD}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_no_way_of_sharing_a_batch_makes_a_difference(tmp_path: Path, loss: dict[str, Any]) -> None:
    model = make_model(tmp_path / "model")
    batches = [make_batch(seed=1), make_batch(seed=2)]
    found = []
    for number, (num_ranks, policy) in enumerate(SHAPES):
        # Two optimizer steps a batch, so that ratios are not all one.
        config = configure(model, loss, train_global_batch_size=4, trainers=num_ranks, **policy)
        folder = tmp_path / str(number)
        found.append((run_ranks(num_ranks, train_rank, config, batches, folder)[0], trained_weights(folder)))
    metrics, weights = found[0]
    for other_metrics, other_weights in found[1:]:
        for one, other in zip(metrics, other_metrics, strict=True):
            assert other == pytest.approx(one, rel=TOLERANCE, abs=TOLERANCE)
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("loss", [GSPO, CISPO, VAPO, ENTROPY], ids=["gspo", "cispo", "vapo", "entropy"])
def test_megatron_core_makes_the_same_steps(tmp_path: Path, loss: dict[str, Any]) -> None:
    model, batches = make_model(tmp_path / "model"), [make_batch(seed=1), make_batch(seed=2)]
    undecayed = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {**ADAMW, "weight_decay": 0.0}}}
    found = []
    for name, num_ranks, policy in (("dtensor", 1, undecayed), ("megatron", 2, MEGATRON | PACKED)):
        config = configure(model, loss, train_global_batch_size=4, trainers=num_ranks, **policy)
        metrics = run_ranks(num_ranks, train_rank, config, batches, tmp_path / name)[0]
        found.append((metrics, trained_weights(tmp_path / name)))
    (metrics, weights), (other_metrics, other_weights) = found
    for one, other in zip(metrics, other_metrics, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [8, 4])
def test_passes_over_a_batch_are_those_of_a_plain_loop(tmp_path: Path, size: int) -> None:
    """Algorithm 1 of arXiv:2402.03300 with mu = 3: ratios are to the policy before the first optimizer step."""
    folder, batches = make_model(tmp_path / "model"), [make_batch(seed=1), make_batch(seed=2)]
    config = make_config(folder, loss={"reference_policy_kl_penalty": 0.1}, train_global_batch_size=size)
    config = msgspec.structs.replace(config, grpo=msgspec.structs.replace(config.grpo, num_iterations=3))
    metrics = run_ranks(1, train_rank, config, batches, tmp_path / "run")[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert_same_steps(metrics, plain_grpo(model, batches, size=size, kl=0.1, num_passes=3))
    assert_same_weights(trained_weights(tmp_path / "run"), model)


def test_reinforce_plus_plus_against_a_plain_loop(tmp_path: Path) -> None:
    """The second step: after the first, policy and reference differ."""
    folder = make_model(tmp_path / "model")
    config = configure(folder, KL_IN_REWARD)
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


def without_sequences(batch: SampleBatch, sequences: list[int]) -> SampleBatch:
    """Return the batch, where no token of these sequences counts."""
    counts_S = ~np.isin(np.arange(len(batch.lengths_S)), sequences)
    return batch.replace(loss_mask_T=batch.loss_mask_T & np.repeat(counts_S, batch.lengths_S))


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_sequences_that_generation_saw_differently_are_left_out(tmp_path: Path, backend: str) -> None:
    """The normalised advantages of the others too are those of a batch without them."""
    folder = make_model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    batch = make_batch(seed=1)
    seen_T, first = np.zeros(len(batch.token_ids_T), dtype=np.float32), 0
    for length in batch.lengths_S:
        token_ids = torch.from_numpy(batch.token_ids_T[first : first + length].astype(np.int64))
        logprobs_TV = model(input_ids=token_ids[None]).logits[0, :-1].log_softmax(-1)
        seen_T[first + 1 : first + length] = logprobs_TV.gather(1, token_ids[1:, None])[:, 0].detach()
        first += length
    wrong_S = np.isin(np.arange(8), [1, 4])
    seen_T -= 1.5 * np.repeat(wrong_S, batch.lengths_S) - 0.5 * np.repeat(~wrong_S, batch.lengths_S)
    batch = batch.replace(
        generation_logprobs_T=np.where(batch.loss_mask_T, seen_T, 0).astype(np.float32),
        rewards_S=np.where(np.arange(8) == 4, 1.0, 0.0).astype(np.float32),
    )
    shapes = [(2, {"train_micro_batch_size": 1})] if backend == "dtensor" else [(2, MEGATRON | PACKED)]
    found = []
    undecayed = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {**ADAMW, "weight_decay": 0.0}}}
    for number, (num_ranks, policy) in enumerate([(1, undecayed if backend == "megatron" else {}), *shapes]):
        config = make_config(folder, estimator="reinforce_plus_plus", trainers=num_ranks, **policy)
        options = {"advantage_clip_low": -0.5, "advantage_clip_high": 1.0}
        if number:
            options["seq_logprob_error_threshold"] = 2.0
        config = msgspec.structs.replace(config, grpo=msgspec.structs.replace(config.grpo, **options))
        given = batch if number else without_sequences(batch, [1, 4])
        metrics = run_ranks(num_ranks, train_rank, config, [given], tmp_path / str(number))[0][0]
        found.append((metrics, trained_weights(tmp_path / str(number))))
    (expected, weights), (metrics, other_weights) = found
    assert metrics.pop("max_seq_mult_prob_error") == pytest.approx(np.exp(1.5), rel=1e-3)
    assert metrics.pop("num_masked_seqs_by_logprob_error") == 2
    assert metrics.pop("masked_correct_pct") == 0.5
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert metrics["num_valid_samples"] == 6
    assert metrics["token_mult_prob_error"] == pytest.approx(np.exp(0.5), rel=1e-3)
    tolerance = TOLERANCE if backend == "dtensor" else 1e-5
    torch.testing.assert_close(other_weights, weights, rtol=0, atol=tolerance)
