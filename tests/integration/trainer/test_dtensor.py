"""The DTensor backend against plain Hugging Face loops that know nothing of ranks, micro-batches or padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.backends.holding import OffloadedStorages
from tandem.trainer.exposed_weights import local_of
from tests.harness.trainers.reference import (
    assert_same_steps,
    assert_same_weights,
    logprobs_of,
    plain_grpo,
    sequences_of,
    trained_weights,
)
from tests.harness.trainers.trainer_harness import (
    ADAMW,
    ARCHITECTURES,
    digest_of,
    evaluate_rank,
    make_batch,
    make_config,
    make_model,
    run_ranks,
    train_on,
    train_rank,
)

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-6


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_grpo_matches_a_plain_loop(architecture: str, world_size: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture)
    config = make_config(folder, loss={"reference_policy_kl_penalty": 0.1}, temperature=0.7)
    batches = [make_batch(seed=seed) for seed in range(3)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_grpo(model, batches, size=8, temperature=0.7, kl=0.1)

    ranks = run_ranks(world_size, train_rank, config, batches, tmp_path / "saved")
    assert all(metrics == ranks[0][0] for metrics, _ in ranks), "every rank reports the same"
    for metrics, (loss, norm) in zip(ranks[0][0], expected, strict=True):
        assert metrics["loss"] == pytest.approx(loss, abs=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
    assert ranks[0][0][0]["kl"] == pytest.approx(0.0, abs=TOLERANCE), "the policy starts at the reference"
    assert ranks[0][0][2]["kl"] > 1e-4
    assert max(norm for _, norm in expected) > 1.0, "clipping is part of what is compared"
    assert_same_weights(trained_weights(tmp_path / "saved"), model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_optimizer_steps_a_batch_share_the_policy_before_the_first(world_size: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    optimizer = {"name": "torch.optim.AdamW", "kwargs": ADAMW}
    config = make_config(folder, train_global_batch_size=4, optimizer=optimizer)
    batches = [make_batch(16, seed=seed) for seed in range(2)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_grpo(model, batches, size=4)

    history, _ = run_ranks(world_size, train_rank, config, batches, tmp_path / "saved")[0]
    assert_same_steps(history, expected, TOLERANCE)
    for metrics in history:
        assert metrics["approx_kl"] > 1e-6, "from the second step on, the policy is no longer the one that sampled"
    assert_same_weights(trained_weights(tmp_path / "saved"), model)


@pytest.mark.parametrize("token_level_loss", [True, False])
def test_neither_micro_batches_nor_ranks_change_the_gradient(token_level_loss: bool, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    found = []
    # Three ranks do not divide eight sequences, nor most dimensions of the model.
    for world_size, micro_batch_size, divisible_by in [(1, 8, 1), (1, 1, 1), (1, 4, 16), (2, 2, 1), (3, 2, 8)]:
        config = make_config(
            folder,
            loss={"token_level_loss": token_level_loss, "reference_policy_kl_penalty": 0.1},
            train_micro_batch_size=micro_batch_size,
            make_sequence_length_divisible_by=divisible_by,
        )
        saved = tmp_path / f"{world_size}-{micro_batch_size}"
        history, _ = run_ranks(world_size, train_rank, config, [make_batch(seed=5)], saved)[0]
        found.append((history[0], trained_weights(saved)))
    metrics, weights = found[0]
    for other_metrics, other_weights in found[1:]:
        assert other_metrics == pytest.approx(metrics, rel=TOLERANCE, abs=TOLERANCE)
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, rtol=0, atol=TOLERANCE)


def test_token_level_and_sequence_level_losses_differ(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    losses = [
        run_ranks(1, train_rank, make_config(folder, loss={"token_level_loss": level}), [make_batch()])[0][0][0]["loss"]
        for level in (True, False)
    ]
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("world_size", [1, 2])
def test_sft_matches_hugging_faces_own_loss(world_size: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    # The sampling temperature is not the business of supervised fine-tuning.
    config = make_config(folder, algorithm="sft", temperature=0.3, max_grad_norm=None)
    batch = make_batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    num_tokens = sum(int(sample["mask"].sum()) for sample in sequences_of(batch))
    total = torch.zeros(())
    for sample in sequences_of(batch):
        labels = sample["token_ids"].clone()
        labels[0] = -100
        labels[1:][~sample["mask"]] = -100
        output = model(input_ids=sample["token_ids"][None], labels=labels[None], num_items_in_batch=num_tokens)
        total = total + output.loss
    total.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    (metrics,), _ = run_ranks(world_size, train_rank, config, [batch])[0]
    assert metrics["loss"] == pytest.approx(total.item(), abs=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=TOLERANCE)
    assert metrics["num_valid_tokens"] == num_tokens
    for evaluation in run_ranks(world_size, evaluate_rank, config, batch):
        assert evaluation["loss"] == pytest.approx(total.item(), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_token_mult_prob_error_compares_with_the_trainers_own_logprobs(temperature: float, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    batch = make_batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    errors, ratios, entropies = [], [], []
    with torch.no_grad():
        for sample in sequences_of(batch):
            difference = (logprobs_of(model, sample["token_ids"], temperature) - sample["generation"])[sample["mask"]]
            errors += difference.abs().exp().tolist()
            ratios += difference.exp().tolist()
            logits = model(input_ids=sample["token_ids"][None]).logits[0, :-1] / temperature
            entropies += torch.distributions.Categorical(logits=logits).entropy()[sample["mask"]].tolist()

    (metrics,), _ = run_ranks(2, train_rank, make_config(folder, temperature=temperature), [batch])[0]
    assert metrics["token_mult_prob_error"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert metrics["sampling_importance_ratio"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert (metrics["probs_ratio"], metrics["clip_fraction"], metrics["approx_kl"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_stays_close_and_keeps_float32_weights(world_size: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    batches = [make_batch(seed=seed) for seed in range(3)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_grpo(model, batches, size=8)
    config = make_config(folder, precision="bfloat16")
    history, _ = run_ranks(world_size, train_rank, config, batches, tmp_path / "saved")[0]
    for metrics, (loss, norm) in zip(history, expected, strict=True):
        assert metrics["loss"] == pytest.approx(loss, abs=0.02)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=0.05)
    weights = trained_weights(tmp_path / "saved")
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())
    assert_same_weights(weights, model, tolerance=3 * 2 * ADAMW["lr"])
    assert any(not torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("key", ["activation_checkpointing_enabled", "dtensor_cfg"])
def test_activation_checkpointing_recomputes_the_same_numbers(key: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    batches = [make_batch(seed=seed) for seed in range(2)]
    value: Any = True if key == "activation_checkpointing_enabled" else {"activation_checkpointing": True}
    plain = run_ranks(2, count_layer_passes, make_config(folder), batches)
    recomputed = run_ranks(2, count_layer_passes, make_config(folder, **{key: value}), batches)
    for (passes, result), (passes_recomputed, result_recomputed) in zip(plain, recomputed, strict=True):
        assert result == result_recomputed
        assert passes_recomputed == 2 * passes


def count_layer_passes(rank: int, config: Config, batches: Sequence[SampleBatch]) -> Any:
    """Train, and count how often the attention inside a layer ran forward."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    backend = DTensorBackend(config, checkpoint=None)
    backend._held["policy", 0].model.model.layers[0].self_attn.register_forward_pre_hook(count)
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    return passes, (metrics, digest_of(backend))


def test_the_same_inputs_give_the_same_bits(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model"), loss={"reference_policy_kl_penalty": 0.1})
    batches = [make_batch(seed=seed) for seed in range(2)]
    assert run_ranks(2, train_rank, config, batches) == run_ranks(2, train_rank, config, batches)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_offloaded_between_steps_comes_back(world_size: int, tmp_path: Path) -> None:
    """On a CPU the memory goes from one place to another, with the code that moves it between a GPU and its host."""
    config = make_config(make_model(tmp_path / "model"))
    batches = [make_batch(seed=seed) for seed in range(3)]
    assert run_ranks(world_size, train_and_offload, config, batches) == run_ranks(
        world_size, train_rank, config, batches
    )


def train_and_offload(rank: int, config: Config, batches: Sequence[SampleBatch]) -> Any:
    backend = DTensorBackend(config, checkpoint=None)
    metrics = []
    for batch in batches:
        metrics.append(train_on(backend, batch, config).metrics)
        policy = backend._held["policy", 0]
        state = policy.movable()
        sizes = [tensor.untyped_storage().nbytes() for tensor in state]
        held = sum(local_of(parameter).nbytes for parameter in policy.parameters.values())
        assert sum(sizes) >= 2 * held, "two moments of each parameter"
        moved = OffloadedStorages(state)
        assert not any(tensor.untyped_storage().nbytes() for tensor in state)
        moved.reload()
        assert [tensor.untyped_storage().nbytes() for tensor in state] == sizes
    return metrics, digest_of(backend)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_no_number_leaves_the_weights_alone(world_size: int, tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model"))
    for message, unchanged in run_ranks(world_size, train_on_nan, config):
        assert message.startswith("optimizer step 2 was not taken: loss nan")
        assert unchanged


def train_on_nan(rank: int, config: Config) -> tuple[str, bool]:
    from tandem.common.errors import TrainingError

    backend = DTensorBackend(config, checkpoint=None)
    train_on(backend, make_batch(), config)
    before = digest_of(backend)
    batch = make_batch()
    advantages = batch.advantages_S.copy()
    advantages[3] = np.nan
    with pytest.raises(TrainingError) as raised:
        train_on(backend, batch.replace(advantages_S=advantages), config)
    unchanged = digest_of(backend) == before
    train_on(backend, batch, config)  # and training can go on
    return str(raised.value), unchanged and digest_of(backend) != before


def test_the_learning_rate_follows_its_schedule(tmp_path: Path) -> None:
    scheduler = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 2}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10}},
        {"milestones": [2]},
    ]
    config = make_config(make_model(tmp_path / "model"), scheduler=scheduler)
    history, _ = run_ranks(1, train_rank, config, [make_batch()] * 4)[0]
    assert [metrics["learning_rate"] for metrics in history] == pytest.approx([1e-4, 5.5e-4, 1e-3, 1e-3])
