"""An optimizer step out of all proportion to those before: its sample is named, and its group set aside by a key.

With the key, the step is bitwise that of a batch in which the group's samples count nothing, as NeMo-RL's
``loss_multiplier`` of zero would have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.numeric import PHRASE
from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backend import TrainerBackend
from tandem.trainer.files import checkpoints
from tandem.trainer.step import TrainResult, train
from tests.harness.trainers.megatron_harness import OPTIMIZER, make, make_checkpoint
from tests.harness.trainers.trainer_harness import digest_of, make_config, make_groups, run_ranks, share_of

pytestmark = pytest.mark.usefixtures("rank_server")

NUM_USUAL = 6
BACKENDS: dict[str, dict[str, Any]] = {
    "DTensor": {},
    "Megatron-Core": {"megatron_cfg": {"enabled": True, "optimizer": OPTIMIZER}},
}


def batch_of(seed: int) -> SampleBatch:
    return make_groups(2, 2, 2, 2, seed=seed)


def wild(batch: SampleBatch) -> SampleBatch:
    """Return a batch in which the second sample of group 2 has an advantage of 200,000."""
    advantages_S = batch.advantages_S.copy()
    advantages_S[5] = 200_000.0
    return batch.replace(advantages_S=advantages_S)


def train_groups(
    backend: TrainerBackend, batch: SampleBatch, config: Config, without: int | None = None
) -> TrainResult:
    """Train on this rank's share of groups of two, as if one counted nothing."""
    table, own = share_of(backend, batch, config)
    groups, samples = np.repeat(np.arange(4, dtype=np.int32), 2), np.tile(np.arange(2, dtype=np.int32), 4)
    rows, kept_S = table.rows_of(backend.data_parallel_rank), groups != without
    num_valid_S = np.where(kept_S, table.num_valid_S, 0).astype(np.int32)
    table = table.replace(group_S=groups, sample_S=samples, num_valid_S=num_valid_S)
    return train(backend, table, own.keep_sequences(kept_S[rows]), config)


def rank(rank: int, config: Config, last: SampleBatch, folder: Path, without: int | None = None) -> Any:
    """Take usual steps, and one more; save."""
    backend = make(config)
    for seed in range(NUM_USUAL):
        assert not train_groups(backend, batch_of(seed), config).notes
    result = train_groups(backend, last, config, without)
    backend.save(folder).num_bytes.result()
    return result.metrics, result.notes, digest_of(backend)


def resumed_rank(rank: int, config: Config, last: SampleBatch, folder: Path) -> Any:
    result = train_groups(make(config, folder), last, config)
    return result.notes


def config_of(model: Path, backend: str, trainers: int, **grpo: Any) -> Config:
    return make_config(model, trainers=trainers, grpo=grpo, **BACKENDS[backend])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize(("backend", "trainers"), [("DTensor", 2), ("Megatron-Core", 1)])
def test_the_sample_is_named_and_its_group_set_aside_by_the_key(
    backend: str, trainers: int, model: Path, tmp_path: Path
) -> None:
    last = batch_of(9)
    config = config_of(model, backend, trainers)
    metrics, notes, _ = run_ranks(trainers, rank, config, wild(last), tmp_path / "step_1")[0]
    assert metrics["grad_norm"] > 1e3, "it is trained on"
    (note,) = notes
    assert PHRASE in note
    assert note.startswith("a gradient norm of ")
    assert "; group 2, sample 1 has 100% of it" in note
    assert note.endswith("(grpo.set_aside_outliers sets such groups aside)")

    config = config_of(model, backend, trainers, set_aside_outliers=True)
    metrics, notes, digest = run_ranks(trainers, rank, config, wild(last), tmp_path / "step_2")[0]
    (note,) = notes
    assert note.endswith(": group 2 is set aside")
    assert metrics["groups_set_aside/outliers"] == 1
    plain, notes, expected = run_ranks(trainers, rank, config, last, tmp_path / "step_3", 2)[0]
    assert not notes
    assert (metrics["loss"], metrics["grad_norm"], digest) == (plain["loss"], plain["grad_norm"], expected)


def test_a_resumed_run_compares_with_the_steps_before(model: Path, tmp_path: Path) -> None:
    config = config_of(model, "DTensor", 1)
    run_ranks(1, rank, config, batch_of(8), tmp_path / "step_7")
    assert len(checkpoints.read_counts(tmp_path / "step_7").grad_norms) == NUM_USUAL + 1
    (notes,) = run_ranks(1, resumed_rank, config, wild(batch_of(9)), tmp_path / "step_7")
    assert PHRASE in notes[0]
