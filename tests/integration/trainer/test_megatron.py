"""What the Megatron-Core backend does besides coming to the same numbers: failures, routers, precision, schedules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.common.errors import ModelError, TrainingError
from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends.megatron import preparing
from tests.harness.trainers.megatron_harness import BATCHES, EP2, PP2, SP, TP2, config_for, make, make_checkpoint
from tests.harness.trainers.reference import plain_numbers, sequences_of
from tests.harness.trainers.trainer_harness import ADAMW, digest_of, make_batch, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")


@pytest.mark.parametrize(("num_ranks", "megatron"), [(1, {}), (2, PP2), (2, EP2), (2, TP2 | SP)])
def test_a_loss_that_is_no_number_leaves_the_weights_alone(
    num_ranks: int, megatron: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "model", "deepseek_v3")
    config = config_for(folder, num_ranks, megatron | {"moe_router_bias_update_rate": 0.01})
    for message, was_unchanged, went_on in run_ranks(num_ranks, train_on_nan, config):
        assert message.startswith("optimizer step 2 was not taken: loss nan")
        assert was_unchanged
        assert went_on


def train_on_nan(rank: int, config: Config) -> tuple[str, bool, bool]:
    backend = make(config)
    train_on(backend, BATCHES[0], config)
    before = digest_of(backend)
    advantages = BATCHES[1].advantages_S.copy()
    advantages[3] = np.nan
    with pytest.raises(TrainingError) as raised:
        train_on(backend, BATCHES[1].replace(advantages_S=advantages), config)
    was_unchanged = digest_of(backend) == before
    train_on(backend, BATCHES[1], config)
    return str(raised.value), was_unchanged, digest_of(backend) != before


@pytest.mark.parametrize("freezes", [False, True])
def test_routers_are_frozen_and_experts_balanced_without_a_gradient(freezes: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "deepseek_v3")
    config = config_for(folder, 2, EP2 | {"freeze_moe_router": freezes, "moe_router_bias_update_rate": 0.01})
    run_ranks(2, train_and_save, config, tmp_path / "step_1")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(each).state_dict()
        for each in (folder, tmp_path / "step_1" / "policy")
    )
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert routers
    assert all(torch.equal(before[name], after[name]) == freezes for name in routers)
    for name in (name for name in before if name.endswith("e_score_correction_bias")):
        moved = (after[name] - before[name]).abs()
        # Experts with more than their share lose a step, the others gain one.
        torch.testing.assert_close(moved[moved > 0], torch.full_like(moved[moved > 0], 0.01), rtol=1e-4, atol=0)
        assert moved.max() > 0


def train_once(rank: int, config: Config, batch: SampleBatch) -> dict[str, float]:
    return train_on(make(config), batch, config).metrics


def train_and_save(rank: int, config: Config, folder: Path) -> None:
    backend = make(config)
    train_on(backend, BATCHES[0], config)
    backend.save(folder).num_bytes.result()


def test_the_loss_that_balances_experts_is_that_of_switch_transformers(tmp_path: Path) -> None:
    """Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, in each layer."""
    folder, batch = make_checkpoint(tmp_path / "model", "qwen3_moe"), make_batch(max_length=4)
    assert len(set(batch.lengths_S.tolist())) == 1, (
        "padding is balanced too, but transformers trains no embedding of it"
    )
    balancing = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
    config = config_for(folder, 1, balancing, train_micro_batch_size=8)
    (metrics,) = run_ranks(1, train_once, config, batch)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    samples = sequences_of(batch)
    output = model(input_ids=torch.stack([sample["token_ids"] for sample in samples]), output_router_logits=True)
    total = torch.zeros(())
    for logits_TV, sample in zip(output.logits[:, :-1] / 0.7, samples, strict=True):
        logprobs_T = logits_TV.log_softmax(-1).gather(1, sample["token_ids"][1:, None])[:, 0]
        # At the first step the ratio to the previous policy is one, and so is its derivative.
        total = total - logprobs_T[sample["mask"]].sum() * sample["advantage"] / metrics["num_valid_tokens"]
    for logits_NE in output.router_logits:
        num_experts = logits_NE.shape[1]
        chosen_NE = torch.zeros_like(logits_NE).scatter(1, logits_NE.topk(2, dim=1).indices, 1.0)
        total = total + 0.5 * num_experts * (chosen_NE.mean(0) / 2 * logits_NE.softmax(-1).mean(0)).sum()
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize(("num_ranks", "megatron"), [(1, {}), (2, TP2), (2, TP2 | SP)])
def test_reading_the_padding_token_trains_nothing(num_ranks: int, megatron: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[model.config.pad_token_id] = 0.0
    model.save_pretrained(folder)
    token_ids_T = BATCHES[0].token_ids_T.copy()
    token_ids_T[2::5] = model.config.pad_token_id
    batch = BATCHES[0].replace(token_ids_T=token_ids_T)
    expected = plain_numbers(folder, [batch], temperature=0.7, kl=0.1, decays_vectors=False)
    config = config_for(folder, num_ranks, megatron)
    for metrics in run_ranks(num_ranks, train_once, config, batch):
        assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx(expected.steps[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("num_ranks", "megatron"), [(1, {}), (2, PP2), (4, TP2 | SP)])
def test_bfloat16_stays_close(num_ranks: int, megatron: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    expected = plain_numbers(folder, BATCHES, temperature=0.7, kl=0.1, decays_vectors=False)
    config = config_for(folder, num_ranks, megatron, precision="bfloat16")
    ranks = run_ranks(num_ranks, train_all_and_save, config, tmp_path)
    assert all(rank == ranks[0] for rank in ranks)
    for metrics, (loss, norm) in zip(ranks[0], expected.steps, strict=True):
        assert metrics["loss"] == pytest.approx(loss, abs=0.02)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=0.05)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    for name, parameter in trained.named_parameters():
        # AdamW's steps are at most the learning rate each, up to the rounding of the weights themselves.
        atol = 3 * 2 * ADAMW["lr"]
        torch.testing.assert_close(parameter.detach(), expected.weights[name], rtol=2**-8, atol=atol)


def train_all_and_save(rank: int, config: Config, folder: Path) -> list[dict[str, float]]:
    backend = make(config)
    metrics = [train_on(backend, batch, config).metrics for batch in BATCHES]
    backend.save(folder).num_bytes.result()
    return metrics


def test_the_learning_rate_follows_its_schedule(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    scheduler = {"lr_warmup_iters": 2, "lr_warmup_init": 1e-4, "lr_decay_style": "cosine", "lr_decay_iters": 6}
    config = config_for(folder, 1, {"scheduler": scheduler, "optimizer": {"min_lr": 2e-4}})
    (rates,) = run_ranks(1, learning_rates, config)
    cosine = [2e-4 + (1e-3 - 2e-4) * (math.cos(math.pi * part / 4) + 1) / 2 for part in (0, 1, 2)]
    assert rates == pytest.approx([1e-4, 5.5e-4, *cosine])


def learning_rates(rank: int, config: Config) -> list[float]:
    backend = make(config)
    return [train_on(backend, BATCHES[number % 3], config).metrics["learning_rate"] for number in range(5)]


CHANGED = "Megatron-Core has changed, and cannot train on a CPU: megatron.core."


CHANGES = {
    "": "",
    "core.optimizer.clip_grads.get_grad_norm_fp32 = lambda grads, norm_type, group: 0.0": (
        f"{CHANGED}optimizer.clip_grads.get_grad_norm_fp32: it does not name CUDA any more"
    ),
    "del core.utils.local_multi_tensor_l2_norm": f"{CHANGED}utils.local_multi_tensor_l2_norm: it is gone",
    "core.tensor_parallel.random._set_cuda_rng_state = lambda state: None": (
        f"{CHANGED}tensor_parallel.random._set_cuda_rng_state: it takes state and took new_state, device, graph_safe"
    ),
    "core.models.common.embeddings.rope_utils.apply_rotary_pos_emb = lambda heads, angles, config: heads": (
        f"{CHANGED}models.common.embeddings.rope_utils.apply_rotary_pos_emb: "
        "it does not look fused_apply_rotary_pos_emb_thd up any more"
    ),
    "core.__version__ = '0.20.0'": ("Megatron-Core 0.20.0 is installed, and known releases are 0.16, 0.17, 0.18, 0.19"),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.items())
def test_what_changed_in_megatron_core_is_named(change: str, expected: str) -> None:
    assert run_ranks(1, error_of, change) == [expected]


def error_of(rank: int, change: str) -> str:
    from megatron import core

    exec(change, {"core": core})
    try:
        preparing.prepare()
    except ModelError as error:
        return str(error)
    return ""
