"""Megatron-Core, however it spreads a model, computes what one process computes with the Hugging Face model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config import Config
from tandem.trainer.backend import TrainerBackend
from tandem.trainer.batching.shard import pad
from tests.harness.trainers.megatron_harness import (
    BATCHES,
    CP2,
    EP2,
    PLAIN,
    PP2,
    SP,
    TP2,
    VIRTUAL,
    config_for,
    make,
    make_checkpoint,
)
from tests.harness.trainers.reference import Numbers, assert_same_numbers, numbers_of, plain_numbers

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
ROW = 16 * 8
"""Divisor of a row's tokens with which each of four ranks has a multiple of 16, in two chunks."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the checkpoint of a model of `megatron_harness`, and what training it in this process comes to."""

    @functools.cache
    def trained(model: str) -> tuple[Path, Numbers]:
        folder = make_checkpoint(tmp_path_factory.mktemp("model"), model)
        return folder, plain_numbers(folder, BATCHES, temperature=0.7, kl=0.1, decays_vectors=False)

    return trained


FULL = {"activation_checkpointing": True}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 2000}}

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank, llama": ("llama", 1, {}),
    "one rank, qwen2": ("qwen2", 1, PLAIN),
    "one rank, qwen3": ("qwen3 tied", 1, {}),
    "one rank, biases in attention": ("llama, biases in attention", 1, {}),
    "one rank, biases in feed-forward": ("llama, biases in feed-forward", 1, {}),
    "TP2": ("qwen2", 2, TP2),
    "TP2, biases": ("llama with biases", 2, TP2),
    "TP2+SP, biases": ("llama with biases", 2, TP2 | SP),
    "TP2+SP+EP2, biases": ("qwen3_moe with biases", 2, TP2 | SP | EP2),
    "TP2+SP": ("qwen3", 2, TP2 | SP),
    "PP2": ("llama", 2, PP2),
    "PP2 tied": ("qwen3 tied", 2, PP2),
    "PP2 with virtual stages": ("qwen3 tied", 2, PP2 | VIRTUAL),
    "PP2, uneven": ("llama", 2, PP2 | {"num_layers_in_first_pipeline_stage": 1}),
    "CP2": ("qwen3", 2, CP2),
    "DP2": ("qwen2", 2, PLAIN),
    "DP2 distributed optimizer": ("qwen3", 2, {}),
    "DP2 distributed optimizer, overlapped": ("qwen3", 2, OVERLAP),
    "full recompute": ("qwen3", 1, FULL),
    "selective recompute": ("qwen3", 1, FULL | SELECTIVE),
    "experts": ("qwen3_moe", 1, {}),
    "EP2": ("qwen3_moe", 2, EP2),
    "TP2+SP, experts": ("qwen3_moe", 2, TP2 | SP),
    "TP2+SP+EP2": ("qwen3_moe", 2, TP2 | SP | EP2),
    "latent attention": ("deepseek_v3", 1, {}),
    "latent attention, TP2+EP2": ("deepseek_v3", 2, TP2 | SP | EP2),
    "latent attention, PP2": ("deepseek_v3", 2, PP2),
    "latent attention, CP2": ("deepseek_v3", 2, CP2),
    "TP2+PP2": ("qwen3", 4, TP2 | PP2),
    "TP2+SP+DP2": ("qwen3", 4, TP2 | SP),
    "TP2+SP+CP2": ("llama", 4, TP2 | SP | CP2),
    "PP2+CP2": ("llama", 4, PP2 | CP2),
    "EP2+DP2": ("qwen3_moe", 4, EP2),
    "EP2+PP2": ("qwen3_moe", 4, EP2 | PP2),
    "TP2+SP+EP2, experts cut": ("qwen3_moe", 4, TP2 | SP | EP2 | {"expert_tensor_parallel_size": 2}),
    "PP2 with virtual stages+DP2": ("llama", 4, PP2 | VIRTUAL),
    "TP2+SP, attention that slides": ("mistral", 2, TP2 | SP),
    "CP2, attention that slides": ("mistral", 2, CP2),
    "TP2, fused in the checkpoint": ("phi3", 2, TP2),
    "TP2+SP+EP2, partly rotated": ("glm4_moe", 2, TP2 | SP | EP2),
}

BY_TOKENS = {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 96, "sequence_length_round": 8}
PACKED, DYNAMIC = {"sequence_packing": BY_TOKENS}, {"dynamic_batching": BY_TOKENS}
BATCHED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "packed": ("qwen3", 1, {}, PACKED),
    "packed, DP2": ("qwen3", 2, {}, PACKED),
    "packed, TP2+SP": ("qwen3", 2, TP2 | SP, PACKED),
    "packed, PP2": ("qwen3", 2, PP2, PACKED),
    "packed, PP2 with virtual stages": ("llama", 2, PP2 | VIRTUAL, PACKED),
    "packed, CP2": ("llama", 2, CP2, PACKED),
    "packed, PP2+CP2": ("llama", 4, PP2 | CP2, PACKED),
    "packed, TP2+SP+EP2": ("qwen3_moe", 2, TP2 | SP | EP2, PACKED),
    "packed, TP2+SP+CP2": ("qwen3", 4, TP2 | SP | CP2, PACKED),
    "packed, latent attention, CP2": ("deepseek_v3", 2, CP2, PACKED),
    "dynamic, DP2": ("qwen3", 2, {}, DYNAMIC),
    "dynamic, PP2 with virtual stages": ("llama", 2, PP2 | VIRTUAL, DYNAMIC),
}


@pytest.mark.parametrize(("model", "num_ranks", "megatron"), CASES.values(), ids=CASES)
def test_three_steps(model: str, num_ranks: int, megatron: dict[str, Any], plain: Any, tmp_path: Path) -> None:
    folder, expected = plain(model)
    assert max(norm for _, norm in expected.steps) > 1.0, "clipping is part of what is compared"
    found = numbers_of(num_ranks, make, config_for(folder, num_ranks, megatron), BATCHES, tmp_path)
    assert_same_numbers(found, expected, TOLERANCE)


@pytest.mark.parametrize(("model", "num_ranks", "megatron", "policy"), BATCHED.values(), ids=BATCHED)
def test_three_steps_by_tokens(
    model: str, num_ranks: int, megatron: dict[str, Any], policy: dict[str, Any], plain: Any, tmp_path: Path
) -> None:
    """Micro-batches of so many tokens, of two or three sequences each, packed or padded."""
    folder, expected = plain(model)
    found = numbers_of(num_ranks, make, config_for(folder, num_ranks, megatron, **policy), BATCHES, tmp_path)
    assert_same_numbers(found, expected, TOLERANCE)


ROUNDED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "padded": ("qwen3", 1, {}, {}),
    "packed, TP2+SP": ("qwen3", 2, TP2 | SP, PACKED),
    "PP2 with virtual stages": ("llama", 2, PP2 | VIRTUAL, {}),
    "experts": ("qwen3_moe", 1, {}, {}),
    "packed, TP2+SP+CP2": ("qwen3", 4, TP2 | SP | CP2, PACKED),
}


@pytest.mark.parametrize(("model", "num_ranks", "megatron", "policy"), ROUNDED.values(), ids=ROUNDED)
def test_three_steps_of_rows_as_long_as_kernels_need(
    model: str, num_ranks: int, megatron: dict[str, Any], policy: dict[str, Any], plain: Any, tmp_path: Path
) -> None:
    """Padding for kernels of fewer bits changes nothing; the kernels themselves are a GPU's."""
    folder, expected = plain(model)
    config = config_for(folder, num_ranks, megatron, **policy)
    found = numbers_of(num_ranks, make_rounding, config, BATCHES, tmp_path)
    assert_same_numbers(found, expected, TOLERANCE)


def make_rounding(config: Config, checkpoint: Path | None = None) -> TrainerBackend:
    """Make a backend whose rows are as long as with products in float8, in blocks of 16 tokens a rank."""
    backend: Any = make(config, checkpoint)
    for (name, _), held in backend._held.items():
        held.pipeline.row_divisor = ROW
        with backend._division_of(name).entered():
            row = held.pipeline.rows([pad(BATCHES[0], [0], divisible_by=8, device=torch.device("cpu"))])[0]
        assert sum(row.sequences.lengths) == ROW
    return backend
