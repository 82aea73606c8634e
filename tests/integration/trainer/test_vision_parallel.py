"""Models that see, with their layers divided over ranks by the DTensor backend, against plain Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.config import Config
from tandem.samples.batch import Batch
from tandem.trainer.backends.dtensor import DTensorBackend
from tests.harness.trainers.reference import (
    Numbers,
    assert_same_numbers,
    gathered_numbers,
    plain_numbers,
    train_one_rank,
    trained_weights,
)
from tests.harness.trainers.trainer_harness import run_ranks, train_on
from tests.harness.trainers.vision_harness import PlainVision, seeing_batch, vision_config
from tests.harness.vision_models import FAMILIES, write_vision_model

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TEXT: dict[str, dict[str, Any]] = {
    family: {"num_attention_heads": 2 if family == "qwen2_5_vl" else 4, "num_key_value_heads": 2} for family in FAMILIES
}
"""Heads for two ranks. The sections of Qwen2.5-VL's positions fill heads of 32 dimensions."""
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 768}}
KINDS: dict[str, dict[str, Any]] = {
    "padded": {"share_prompts": False},
    "shared": {"train_micro_batch_size": 4},
    "packed": {**PACKED, "activation_checkpointing_enabled": True},
}


def make(config: Config) -> DTensorBackend:
    return DTensorBackend(config, checkpoint=None)


def train_all(rank: int, configs: Sequence[Config], batch: Batch, folder: Path) -> list[Any]:
    """Train a model with each of these configurations, one after the other."""
    return [train_one_rank(rank, make, config, [batch], folder / str(number)) for number, config in enumerate(configs)]


def check(configs: Sequence[Config], names: Sequence[str], world_size: int, folder: Path) -> None:
    """Compare what ranks find with each configuration with what plain Hugging Face finds."""
    batch = seeing_batch(configs[0])
    expected = plain_numbers(PlainVision(configs[0], batch), [batch], temperature=1.0, kl=0.1)
    ranks = run_ranks(world_size, train_all, configs, batch, folder)
    for number, name in enumerate(names):
        found: Numbers = gathered_numbers([each[number] for each in ranks], folder / str(number))
        try:
            assert_same_numbers(found, expected, TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_ranks_match_plain_hugging_face(family: str, world_size: int, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path / "model", **TEXT[family])
    loss = {"reference_policy_kl_penalty": 0.1}
    configs = [
        vision_config(folder, tmp_path / "run", loss=loss, trainers=world_size, dtensor_cfg=TP2, **settings)
        for settings in KINDS.values()
    ]
    check(configs, list(KINDS), world_size, tmp_path / "saved")
