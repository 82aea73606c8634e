"""Models that see, trained by Megatron-Core, against plain Hugging Face with pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.config import Config
from tests.harness.trainers.megatron_harness import OPTIMIZER, PLAIN, PP2, SP, TP2, VIRTUAL, make
from tests.harness.trainers.reference import (
    assert_same_numbers,
    numbers_of,
    plain_numbers,
)
from tests.harness.trainers.vision_harness import PlainVision, seeing_batch, vision_config
from tests.harness.vision_models import write_vision_model

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TEXT = {"num_key_value_heads": 2, "num_hidden_layers": 4}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 768}}
UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank": ("qwen2_5_vl", 1, {}, {}, {}),
    "one rank, llama": ("smolvlm", 1, {}, {}, PACKED),
    "DP2, packed": ("qwen2_5_vl", 2, {}, {}, PACKED),
    "TP2": ("qwen2_5_vl", 2, TP2, {}, {}),
    "TP2+SP, packed": ("qwen2_5_vl", 2, TP2 | SP, {}, PACKED),
    "PP2": ("qwen2_5_vl", 2, PP2, {}, {}),
    "PP2, packed, untied": ("qwen2_5_vl", 2, PP2, UNTIED, PACKED),
    "PP2 with virtual stages": ("qwen2_5_vl", 2, PP2 | VIRTUAL, {}, {}),
    "TP2+SP+PP2": ("idefics3", 4, TP2 | SP | PP2, {}, {}),
    "TP2+DP2, plain optimizer": ("qwen2_5_vl", 4, TP2 | PLAIN, {}, PACKED),
}


def megatron_config(folder: Path, num_ranks: int, megatron: dict[str, Any], runs: Path, **policy: Any) -> Config:
    megatron = {"enabled": True, **megatron, "optimizer": OPTIMIZER | megatron.get("optimizer", {})}
    loss = {"reference_policy_kl_penalty": 0.1}
    return vision_config(folder, runs, loss=loss, trainers=num_ranks, megatron_cfg=megatron, **policy)


@pytest.mark.parametrize(("family", "num_ranks", "megatron", "text", "policy"), CASES.values(), ids=CASES)
def test_layouts_match_plain_hugging_face(
    family: str, num_ranks: int, megatron: dict[str, Any], text: dict[str, Any], policy: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_vision_model(family, tmp_path / "model", **{**TEXT, **text})
    config = megatron_config(folder, num_ranks, megatron, tmp_path / "run", **policy)
    batches = [seeing_batch(config, seed=seed) for seed in range(2)]
    expected = plain_numbers(
        PlainVision(config, batches[0]), batches, temperature=1.0, kl=0.1, decays_vectors=False
    )
    found = numbers_of(num_ranks, make, config, batches, tmp_path / "saved")
    assert_same_numbers(found, expected, TOLERANCE)
