"""Models that see, trained by the DTensor backend, against plain Hugging Face with pixels."""

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
)
from tests.harness.trainers.trainer_harness import run_ranks
from tests.harness.trainers.vision_harness import PlainVision, seeing_batch, vision_config
from tests.harness.vision_models import write_vision_model

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 768}}
KINDS: dict[str, dict[str, Any]] = {
    "padded": {"share_prompts": False},
    "shared": {"train_micro_batch_size": 4},
    "packed": {**PACKED},
}


def make(config: Config) -> DTensorBackend:
    return DTensorBackend(config, checkpoint=None)


def train_all(rank: int, configs: Sequence[Config], batch: Batch, folder: Path) -> list[Any]:
    """Train a model with each of these configurations, one after the other."""
    return [train_one_rank(rank, make, config, [batch], folder / str(number)) for number, config in enumerate(configs)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_matches_plain_hugging_face(family: str, world_size: int, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path / "model")
    configs = [vision_config(folder, tmp_path / "run", **settings) for settings in KINDS.values()]
    batch = seeing_batch(configs[0])
    expected = plain_numbers(PlainVision(configs[0], batch), [batch], temperature=1.0, kl=0.0)

    ranks = run_ranks(world_size, train_all, configs, batch, tmp_path / "saved")
    for number, kind in enumerate(KINDS):
        found: Numbers = gathered_numbers([each[number] for each in ranks], tmp_path / "saved" / str(number))
        try:
            assert_same_numbers(found, expected, TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error
