"""Reward models on real processes: the numbers of a plain loop of Transformers' own sequence classifier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends import make_backend
from tests.harness.trainers.megatron_harness import CP2, PP2, SP, TP2, make_checkpoint
from tests.harness.trainers.megatron_harness import OPTIMIZER as MEGATRON_OPTIMIZER
from tests.harness.trainers.trainer_harness import (
    ADAMW,
    digest_of,
    evaluate_on,
    make_config,
    make_groups,
    run_ranks,
    train_on,
)

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
PAD = 0
# Megatron-Core does not decay vectors, torch does.
OPTIMIZER = ADAMW | {"weight_decay": 0.0}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}
MEGATRON: dict[str, Any] = {"enabled": True, "optimizer": MEGATRON_OPTIMIZER | {"weight_decay": 0.0}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "one rank, one pair at a time": (1, {"train_micro_batch_size": 1, "activation_checkpointing_enabled": True}),
    "two ranks": (2, {}),
    "two ranks, packed": (2, PACKED),
    "two tensor-parallel ranks, packed": (2, {"dtensor_cfg": {"tensor_parallel_size": 2}, **PACKED}),
    "two tensor-parallel ranks along sequences": (
        2,
        {"dtensor_cfg": {"tensor_parallel_size": 2, "sequence_parallel": True}},
    ),
    "two context-parallel ranks": (2, {"dtensor_cfg": {"context_parallel_size": 2}}),
    "Megatron-Core, one rank": (1, {"megatron_cfg": MEGATRON}),
    "Megatron-Core, two ranks": (2, {"megatron_cfg": MEGATRON}),
    "Megatron-Core, two stages": (2, {"megatron_cfg": MEGATRON | PP2}),
    "Megatron-Core, two tensor-parallel ranks along sequences": (2, {"megatron_cfg": MEGATRON | TP2 | SP}),
    "Megatron-Core, two context-parallel ranks": (2, {"megatron_cfg": MEGATRON | CP2}),
}
"""Ranks, and keys of ``policy``."""


def pairs(*sizes: int, seed: int) -> SampleBatch:
    """Pairs of responses as the coordinator makes them: each is followed by padding, and that alone counts."""
    batch = make_groups(*sizes, seed=seed)
    ends = np.cumsum(batch.lengths_S)
    lengths_S = batch.lengths_S + 1
    token_ids_T = np.insert(batch.token_ids_T, ends, PAD).astype(np.int32)
    margins_S = np.random.default_rng(seed).uniform(0.0, 0.5, len(ends)).astype(np.float32)
    margins_S[1::2] = 0.0
    return batch.replace(
        lengths_S=lengths_S,
        token_ids_T=token_ids_T,
        loss_mask_T=token_ids_T == PAD,
        generation_logprobs_T=np.zeros(len(token_ids_T), dtype=np.float32),
        rewards_S=margins_S,
    )


BATCHES = [pairs(2, 2, 2, 2, seed=seed) for seed in range(3)]
HELD_OUT = pairs(2, 2, 2, 2, 2, 2, seed=3)


def pairs_config(folder: Path, *, trainers: int = 1, **policy: Any) -> Config:
    """Four pairs an optimizer step."""
    settings: dict[str, Any] = {
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": OPTIMIZER},
        "reward_model_cfg": {"enabled": True},
        **policy,
    }
    return make_config(
        folder,
        algorithm="rm",
        rm={"val_global_batch_size": 6, "val_micro_batch_size": 3},
        trainers=trainers,
        **settings,
    )


def train_rank(
    rank: int, config: Config, batches: Sequence[SampleBatch], saved: Path, checkpoint: Path | None = None
) -> tuple[list[dict[str, float]], dict[str, float], int]:
    """Train, evaluate and save; return the metrics of each step, those held out, and the digest of the weights."""
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    backend = make_backend(config, checkpoint=checkpoint)
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    held_out = evaluate_on(backend, HELD_OUT, config, {"easy": 4, "hard": 8})
    backend.save(saved).num_bytes.result()
    return metrics, held_out, digest_of(backend)


def scores_of(model: Any, batch: SampleBatch) -> torch.Tensor:
    """Return what Transformers' class makes of a padded batch of whole sequences, each with its token of padding."""
    width = int(batch.lengths_S.max())
    token_ids = torch.full((len(batch.lengths_S), width), PAD)
    for row, (length, end) in enumerate(zip(batch.lengths_S, np.cumsum(batch.lengths_S), strict=True)):
        token_ids[row, :length] = torch.from_numpy(batch.token_ids_T[end - length : end].astype(np.int64))
    logits: torch.Tensor = model(input_ids=token_ids, attention_mask=(token_ids != PAD).long()).logits
    return logits[:, 0]


def plain_loss(model: Any, batch: SampleBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss, with gradient, and what there is to report."""
    scores = scores_of(model, batch)
    chosen, rejected = scores[::2], scores[1::2]
    ahead = chosen - rejected
    loss = -torch.log(torch.sigmoid(ahead - torch.from_numpy(batch.rewards_S[::2]))).mean()
    metrics = {
        "loss": loss,
        "accuracy": (ahead > 0).float().mean(),
        "rewards_chosen_mean": chosen.mean(),
        "rewards_rejected_mean": rejected.mean(),
        "num_valid_samples": torch.tensor(len(ahead)),
    }
    return loss, {name: float(value.detach()) for name, value in metrics.items()}


class Plain(NamedTuple):
    """What training with plain transformers comes to."""

    steps: list[dict[str, float]]
    held_out: dict[str, float]
    model: Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    torch.set_num_threads(1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    steps = []
    for batch in BATCHES:
        loss, metrics = plain_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(metrics | {"grad_norm": float(norm)})
    held_out = {}
    with torch.no_grad():
        for prefix, part in (
            ("", HELD_OUT),
            ("easy/", HELD_OUT.take(slice(4))),
            ("hard/", HELD_OUT.take(slice(4, 12))),
        ):
            held_out |= {f"{prefix}{name}": value for name, value in plain_loss(model, part)[1].items()}
    return Plain(steps, held_out, model)


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_a_plain_loop(case: str, folder: Path, plain: Plain, tmp_path: Path) -> None:
    num_ranks, policy = CASES[case]
    config = pairs_config(folder, trainers=num_ranks, **policy)
    first, *others = run_ranks(num_ranks, train_rank, config, BATCHES, tmp_path / "step_3")
    found, held_out, _ = first
    assert all(other[:2] == first[:2] for other in others), "every rank reports the same"
    for number, (metrics, expected) in enumerate(zip(found, plain.steps, strict=True)):
        wanted = dict(expected)
        if number == 0:  # all scores are zero but for rounding
            del wanted["accuracy"]
        assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)
    assert {name: held_out[name] for name in plain.held_out} == pytest.approx(
        plain.held_out, rel=TOLERANCE, abs=TOLERANCE
    )

    saved = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "step_3" / "policy")
    assert saved.config.num_labels == 1
    weights = dict(saved.named_parameters())
    for name, parameter in plain.model.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=0, atol=TOLERANCE), name
    with torch.no_grad():
        scores, expected_scores = scores_of(saved.eval(), HELD_OUT), scores_of(plain.model, HELD_OUT)
    assert torch.allclose(scores, expected_scores, rtol=0, atol=TOLERANCE)
    assert float(scores.std()) > 1e-3, "they differ from one response to the next"


@pytest.mark.parametrize("case", ["two ranks", "Megatron-Core, two stages"])
def test_a_run_that_is_resumed_equals_one_that_was_not_to_the_bit(case: str, folder: Path, tmp_path: Path) -> None:
    config = pairs_config(folder, trainers=2, **CASES[case][1])
    metrics, _, digest = run_ranks(2, train_rank, config, BATCHES, tmp_path / "step_3")[0]
    run_ranks(2, train_rank, config, BATCHES[:2], tmp_path / "step_2")
    resumed = run_ranks(2, train_rank, config, BATCHES[2:], tmp_path / "again" / "step_3", tmp_path / "step_2")[0]
    assert (resumed[0], resumed[2]) == (metrics[2:], digest)
