"""Rollout routing replay on Megatron-Core: tokens go to the experts that the engine sent them to."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tandem.samples.routed_experts import RoutedExperts
from tests.harness.runs.routing_harness import REPLAY, given_of, plain_model, routed
from tests.harness.trainers.megatron_harness import (
    BATCHES,
    CP2,
    EP2,
    PP2,
    SP,
    TP2,
    VIRTUAL,
    config_for,
    make,
    make_checkpoint,
)
from tests.harness.trainers.reference import assert_same_numbers, numbers_of, plain_numbers

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
EXPERTS = RoutedExperts(num_layers=4, num_experts=4, top_k=2)
ROUTED = tuple(routed(batch, seed=seed, experts=EXPERTS) for seed, batch in enumerate(BATCHES))
_BY_TOKENS = {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 96, "sequence_length_round": 8}
PACKED = {"sequence_packing": _BY_TOKENS}
RECOMPUTED = {"activation_checkpointing": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the checkpoint of a model, and what training it comes to in this process with a router that is masked."""

    @functools.cache
    def trained(model: str) -> Any:
        folder = make_checkpoint(tmp_path_factory.mktemp("model"), model)
        plain = plain_model(folder, given_of(ROUTED, EXPERTS))
        return folder, plain_numbers(plain, ROUTED, temperature=0.7, kl=0.1, decays_vectors=False)

    return trained


@pytest.mark.parametrize(
    ("model", "num_ranks", "megatron", "policy"),
    [
        ("qwen3_moe", 1, {}, {}),
        ("qwen3_moe", 2, PP2 | VIRTUAL | RECOMPUTED, {}),
        ("qwen3_moe", 2, PP2 | RECOMPUTED, PACKED),
        ("qwen3_moe", 2, TP2 | SP | EP2, PACKED),
        ("qwen3_moe", 2, CP2, {}),
        ("deepseek_v3", 2, EP2, {}),
    ],
    ids=["one rank", "virtual stages", "stages, packed", "TP2+EP2, packed", "CP2", "groups of experts, EP2"],
)
def test_three_steps_match_a_plain_loop_that_masks_the_router(
    model: str, num_ranks: int, megatron: dict[str, Any], policy: dict[str, Any], plain: Any, tmp_path: Path
) -> None:
    folder, expected = plain(model)
    config = config_for(folder, num_ranks, megatron, **REPLAY, **policy)
    assert_same_numbers(numbers_of(num_ranks, make, config, ROUTED, tmp_path), expected, TOLERANCE)
