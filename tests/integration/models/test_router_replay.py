"""Rollout routing replay on the DTensor backend: tokens go to the experts that the engine sent them to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.samples.batch import SampleBatch
from tandem.samples.routed_experts import COLUMN
from tests.harness.runs.routing_harness import (
    EXPERTS,
    REPLAY,
    SHARP,
    generated,
    given_of,
    make_sharp_model,
    plain_model,
    routed,
)
from tests.harness.trainers.reference import (
    TOLERANCE,
    assert_same_steps,
    assert_same_weights,
    plain_grpo,
    trained_weights,
)
from tests.harness.trainers.trainer_harness import make_config, make_groups, make_model, run_ranks, train_rank

pytestmark = pytest.mark.usefixtures("rank_server")

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 60}}
_LOSS = {"reference_policy_kl_penalty": 0.1}


def dtensor(**sizes: Any) -> dict[str, Any]:
    return {"dtensor_cfg": {"enabled": True, **sizes}}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", norm_topk_prob=True)


@pytest.mark.parametrize(
    ("num_trainers", "policy"),
    [
        (1, {"share_prompts": False, "activation_checkpointing_enabled": True}),
        (2, {"share_prompts": True, "train_micro_batch_size": 4}),
        (1, PACKED),
        (2, {**PACKED, **dtensor(context_parallel_size=2)}),
        (2, {"share_prompts": False, **dtensor(tensor_parallel_size=2)}),
        (2, {"share_prompts": False, **dtensor(tensor_parallel_size=2, sequence_parallel=True)}),
        (2, {"share_prompts": True, "train_micro_batch_size": 4, **dtensor(expert_parallel_size=2)}),
    ],
    ids=["recomputed", "prompts", "packed", "context", "tensor", "sequence", "experts"],
)
def test_steps_match_a_plain_loop_that_masks_the_router(
    moe: Path, num_trainers: int, policy: Mapping[str, Any], tmp_path: Path
) -> None:
    # Four tokens of all prompts go the same way, so that some prompts are shared, and others are only alike in tokens.
    batches = [routed(make_groups(4, 4, 4, 4, seed=seed), seed=seed, num_alike=4) for seed in range(2)]
    config = make_config(moe, loss=_LOSS, trainers=num_trainers, **REPLAY, **policy)
    model = plain_model(moe, given_of(batches))
    # Two optimizer steps a batch, so previous and reference log-probabilities are computed of the same routes.
    expected = plain_grpo(model, batches, size=8, kl=0.1)
    metrics, _ = run_ranks(num_trainers, train_rank, config, batches, tmp_path / "saved")[0]
    assert_same_steps(metrics, expected, TOLERANCE)
    assert_same_weights(trained_weights(tmp_path / "saved"), model)


@pytest.mark.parametrize("policy", [{"share_prompts": False}, {"train_micro_batch_size": 4}, PACKED], ids=str)
def test_without_noise_replay_changes_nothing(moe: Path, policy: Mapping[str, Any], tmp_path: Path) -> None:
    batch = generated(moe)
    found = {}
    for name, section in (("own", {}), ("replayed", REPLAY)):
        config = make_config(moe, **section, **policy)
        history, _ = run_ranks(1, train_rank, config, [batch], tmp_path / name)[0]
        found[name] = history[0], trained_weights(tmp_path / name)
    assert found["replayed"][0] == pytest.approx(found["own"][0], rel=1e-6, abs=1e-6)
    assert found["own"][0]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    for name, tensor in found["own"][1].items():
        torch.testing.assert_close(found["replayed"][1][name], tensor, rtol=0, atol=1e-6)


def test_replay_closes_most_of_the_gap_that_noise_makes(tmp_path: Path) -> None:
    """An engine in bfloat16 and a trainer in float32 send tokens to other experts; with replay they do not."""
    folder = make_sharp_model(tmp_path / "model")
    batch = generated(folder, dtype="bfloat16", num_tokens=48, experts=SHARP)
    own, replayed = (_error(folder, batch, section) for section in ({}, REPLAY))
    print(f"token_mult_prob_error: {own:.5f} without replay, {replayed:.5f} with it")
    assert own > 1.03
    assert 1.0 < replayed < 1 + (own - 1) / 3


def _error(folder: Path, batch: SampleBatch, section: Mapping[str, Any]) -> float:
    history, _ = run_ranks(1, train_rank, make_config(folder, max_total_sequence_length=64, **section), [batch])[0]
    return float(history[0]["token_mult_prob_error"])


def test_unknown_routes_are_the_routers_own(moe: Path) -> None:
    batch = generated(moe)
    nothing_TX = EXPERTS.nothing(len(batch.token_ids_T))
    unknown = batch.replace(**{COLUMN: nothing_TX})
    elsewhere = routed(batch)
    config = make_config(moe, **REPLAY)
    logged, no_route, other = (
        run_ranks(1, train_rank, config, [each])[0][0][0] for each in (batch, unknown, elsewhere)
    )
    assert no_route == pytest.approx(logged, rel=1e-6, abs=1e-6)
    assert abs(other["token_mult_prob_error"] - logged["token_mult_prob_error"]) > 0.01
    assert np.isfinite(other["grad_norm"])
