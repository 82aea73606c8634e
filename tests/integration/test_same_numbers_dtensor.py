"""However ranks share the work under the DTensor backend, the numbers are those of Hugging Face in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tandem.trainer.backends.dtensor import DTensorBackend
from tests.integration.reference import Numbers, assert_same_numbers, numbers_of, plain_numbers
from tests.integration.trainer_harness import make_batch, make_config, make_model

pytestmark = pytest.mark.usefixtures("rank_server")

TEMPERATURE = 0.7
KL = 0.1
BATCHES = [make_batch(seed=seed) for seed in range(3)]

TP2: dict[str, Any] = {"tensor_parallel_size": 2}
SP: dict[str, Any] = {"sequence_parallel": True}
CP2: dict[str, Any] = {"context_parallel_size": 2}
PACKED: dict[str, Any] = {"packed": True}
"""Rows of 48 tokens: two or three sequences."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "FSDP2": ("qwen3", 2, {}),
    "TP2 llama": ("llama", 2, TP2),
    "TP2 qwen2": ("qwen2", 2, TP2),
    "TP2 qwen3": ("qwen3", 2, TP2),
    "TP2 qwen3_moe": ("qwen3_moe", 2, TP2),
    "TP2 + SP": ("qwen3", 2, TP2 | SP),
    "TP2 + SP of experts": ("qwen3_moe", 2, TP2 | SP),
    "FSDP2 + TP2": ("qwen2", 4, TP2),
    "FSDP2 + TP2 + SP": ("qwen3", 4, TP2 | SP),
    "CP2": ("qwen3", 2, CP2),
    "CP2 + TP2": ("qwen2", 4, CP2 | TP2),
    "CP2 + TP2 + SP": ("qwen3_moe", 4, CP2 | TP2 | SP),
    "FSDP2 + CP2": ("llama", 4, CP2),
    "CPU offload": ("qwen3", 2, {"cpu_offload": True}),
    "CPU offload, FSDP2 + TP2": ("llama", 4, TP2 | {"cpu_offload": True}),
    "packed, FSDP2": ("qwen3", 2, PACKED),
    "packed, TP2 + SP": ("qwen3_moe", 2, PACKED | TP2 | SP),
    "packed, CP2 + TP2": ("qwen2", 4, PACKED | CP2 | TP2),
    "recomputed activations, TP2 + SP": ("qwen3", 2, TP2 | SP | {"activation_checkpointing": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models lie, each in a folder of its architecture's name."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """The numbers of an architecture's model in one process, each computed once."""

    @functools.cache
    def numbers(architecture: str) -> Numbers:
        make_model(folder / architecture, architecture)
        return plain_numbers(folder / architecture, BATCHES, temperature=TEMPERATURE, kl=KL)

    return numbers


@pytest.mark.parametrize(("architecture", "num_ranks", "settings"), CASES.values(), ids=CASES)
def test_the_numbers_are_those_of_one_process(
    architecture: str, num_ranks: int, settings: dict[str, Any], plain: Any, folder: Path, tmp_path: Path
) -> None:
    expected = plain(architecture)
    packs = "packed" in settings
    packing = {"enabled": packs, "train_mb_tokens": 48, "logprob_mb_tokens": 96, "sequence_length_round": 8}
    config = make_config(
        folder / architecture,
        loss={"reference_policy_kl_penalty": KL},
        temperature=TEMPERATURE,
        trainers=num_ranks,
        share_prompts=False,
        dtensor_cfg={key: value for key, value in settings.items() if key != "packed"},
        sequence_packing=packing,
    )
    found = numbers_of(num_ranks, functools.partial(DTensorBackend, checkpoint=None), config, BATCHES, tmp_path)
    assert_same_numbers(found, expected, 1e-5)
    assert max(norm for _, norm in expected.steps) > 1.0, "clipping is part of what is compared"
