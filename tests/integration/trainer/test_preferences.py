"""DPO on real processes against a plain Hugging Face loop that takes one response at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends import make_backend
from tests.harness.trainers.megatron_harness import make_checkpoint
from tests.harness.trainers.reference_preferences import BETA, SFT_WEIGHT, plain_dpo
from tests.harness.trainers.trainer_harness import (
    ADAMW,
    digest_of,
    evaluate_on,
    make_config,
    make_groups,
    make_model,
    run_ranks,
    train_on,
)

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-6
# Megatron-Core does not decay vectors, torch does.
OPTIMIZER = ADAMW | {"weight_decay": 0.0}
DPO: dict[str, Any] = {
    "reference_policy_kl_penalty": BETA,
    "sft_loss_weight": SFT_WEIGHT,
    "sft_average_log_probs": True,
}


def pairs_config(folder: Path, dpo: dict[str, Any] | None = None, *, trainers: int = 1, **policy: Any) -> Config:
    """Four pairs an optimizer step."""
    settings: dict[str, Any] = {
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 1,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": OPTIMIZER},
        **policy,
    }
    return make_config(folder, algorithm="dpo", dpo={**DPO, **(dpo or {})}, trainers=trainers, **settings)


PARTS = {"easy": 4, "hard": 8}
"""Sequences of two validation sets: two pairs and four."""


def batches_of_pairs(count: int) -> list[SampleBatch]:
    """Four pairs each; the two responses to a prompt have lengths of their own."""
    return [make_groups(2, 2, 2, 2, seed=seed) for seed in range(count)]


def train_rank(rank: int, config: Config, batches: Sequence[SampleBatch], checkpoint: Path | None = None) -> Any:
    backend = make_backend(config, checkpoint=checkpoint)
    return [train_on(backend, batch, config).metrics for batch in batches], digest_of(backend)


def evaluate_rank(rank: int, config: Config, batch: SampleBatch, held_out: SampleBatch) -> dict[str, float]:
    """Train once, so that policy and reference differ, and evaluate."""
    backend = make_backend(config, checkpoint=None)
    train_on(backend, batch, config)
    before = digest_of(backend)
    metrics = evaluate_on(backend, held_out, config, PARTS)
    assert digest_of(backend) == before
    return metrics


def save_rank(rank: int, config: Config, batches: Sequence[SampleBatch], folder: Path) -> None:
    backend = make_backend(config, checkpoint=None)
    for batch in batches:
        train_on(backend, batch, config)
    backend.save(folder).num_bytes.result()


def megatron(**sizes: Any) -> dict[str, Any]:
    optimizer = {"optimizer": "adam", "lr": ADAMW["lr"], "weight_decay": 0.0, "adam_eps": ADAMW["eps"]}
    return {"megatron_cfg": {"enabled": True, "optimizer": optimizer, **sizes}}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "FSDP2": (2, {}),
    "TP2, packed": (2, {"dtensor_cfg": {"tensor_parallel_size": 2}, "sequence_packing": {"enabled": True}}),
    "dynamic batches": (1, {"dynamic_batching": {"enabled": True}}),
    "Megatron-Core": (1, megatron()),
    "Megatron-Core, PP2": (2, megatron(pipeline_model_parallel_size=2)),
    "Megatron-Core, TP2, packed": (
        2,
        {**megatron(tensor_model_parallel_size=2), "sequence_packing": {"enabled": True}},
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A model, and what training it in this process comes to, step by step."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    expected = []
    for batch in batches_of_pairs(3):
        loss, metrics = plain_dpo(model, reference, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(metrics | {"loss": float(loss.detach()), "grad_norm": float(norm)})
    assert abs(expected[2]["rewards_chosen_mean"]) > 1e-3, "the policy has left the reference"
    del expected[0]["accuracy"]  # the policy is still the reference: rewards are nothing but rounding
    return folder, expected


@pytest.mark.parametrize(("num_ranks", "policy"), CASES.values(), ids=CASES)
def test_dpo_matches_a_plain_loop(
    num_ranks: int, policy: dict[str, Any], plain: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, expected = plain
    config = pairs_config(folder, trainers=num_ranks, **policy)
    ranks = run_ranks(num_ranks, train_rank, config, batches_of_pairs(3))
    for found, wanted in zip(ranks[0][0], expected, strict=True):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    # Only the last stage of a pipeline has a loss to report of; what is reported is the same on every rank.
    assert all(metrics == ranks[0][0] for metrics, _ in ranks)


def test_neither_micro_batches_nor_ranks_nor_shared_prompts_change_anything(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    batches = batches_of_pairs(2)
    found = []
    # Three ranks do not divide four pairs.
    for world_size, size, share in [(1, 4, True), (1, 1, False), (1, 2, True), (2, 1, True), (3, 2, False)]:
        config = pairs_config(folder, train_micro_batch_size=size, share_prompts=share)
        found.append(run_ranks(world_size, train_rank, config, batches)[0][0])
        del found[-1][0]["accuracy"]  # of rewards that are nothing but rounding
    for other in found[1:]:
        for metrics, wanted in zip(other, found[0], strict=True):
            assert metrics == pytest.approx(wanted, rel=1e-5, abs=TOLERANCE)


@pytest.mark.parametrize("case", ["one rank", "FSDP2", "Megatron-Core, PP2"])
def test_validation_measures_what_training_does(case: str, tmp_path: Path) -> None:
    num_ranks, policy = CASES[case]
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    sizes = {"val_global_batch_size": 6, "val_micro_batch_size": 3}
    config = pairs_config(folder, sizes, trainers=num_ranks, **policy)
    batch, held_out = make_groups(2, 2, 2, 2, seed=1), make_groups(2, 2, 2, 2, 2, 2, seed=2)
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    plain_dpo(model, reference, batch)[0].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    expected = {}
    for prefix, part in (("", held_out), ("easy/", held_out.take(slice(4))), ("hard/", held_out.take(slice(4, 12)))):
        loss, metrics = plain_dpo(model, reference, part)
        metrics |= {"loss": float(loss.detach()), "num_valid_tokens": float(part.loss_mask_T.sum())}
        expected |= {f"{prefix}{name}": value for name, value in metrics.items()}
    for found in run_ranks(num_ranks, evaluate_rank, config, batch, held_out):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_resumed_run_equals_an_uninterrupted_one_and_keeps_its_reference(tmp_path: Path) -> None:
    config = pairs_config(make_model(tmp_path / "model"))
    batches = batches_of_pairs(4)
    whole, digest = run_ranks(2, train_rank, config, batches)[0]
    run_ranks(2, save_rank, config, batches[:2], tmp_path / "saved")
    resumed, resumed_digest = run_ranks(2, train_rank, config, batches[2:], tmp_path / "saved")[0]
    assert resumed == whole[2:], "with the saved policy as reference, rewards would begin at zero again"
    assert resumed_digest == digest
