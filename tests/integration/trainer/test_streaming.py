"""Streaming training: the optimizer step of groups that came one after another is that of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from tandem.config import Config
from tandem.samples.batch import SampleBatch, build_given_table
from tandem.samples.batch_sharding import BatchSharding
from tandem.trainer import step
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.streaming import StreamedGradient
from tests.harness.trainers.trainer_harness import make_config, make_groups, make_model, run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

NUM_GROUPS, NUM_SAMPLES = 6, 4
PARTS = ([0, 3], [1])
"""Groups that come before the others, in two parts."""
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
WEIGHTED = {"use_importance_sampling_correction": True}


class Stepped(msgspec.Struct):
    """What a rank says of a step."""

    metrics: dict[str, float]
    gradients: dict[str, NDArray[Any]]
    """Whole gradients, as they were clipped."""
    weights: dict[str, NDArray[Any]]
    logprobs_T: NDArray[Any]
    rows: NDArray[Any]
    """The sequences of the rank's shard."""


def table_of(batch: SampleBatch) -> SampleBatch:
    """Return the table of a generated batch: groups of samples that two rollouts have."""
    groups = np.repeat(np.arange(NUM_GROUPS), NUM_SAMPLES)
    return (
        build_given_table(batch)
        .replace(
            source_S=(groups % 2).astype(np.int32),
            command_S=(10 + groups).astype(np.int64),
            group_S=groups.astype(np.int32),
            sample_S=np.tile(np.arange(NUM_SAMPLES), NUM_GROUPS).astype(np.int32),
        )
        .attach_sources(["rollout-0", "rollout-1"])
    )


def whole(tensor: torch.Tensor) -> NDArray[Any]:
    whole_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole_tensor.detach().clone().numpy()


def take_step(
    rank: int, config: Config, batch: SampleBatch, parts: Sequence[Sequence[int]], final: Mapping[str, NDArray[Any]]
) -> Stepped:
    """Train on a batch whose groups come in parts, and then the others; `final` are columns of the whole batch."""
    backend = DTensorBackend(config, checkpoint=None)
    sharding = BatchSharding.of(config, shares_prompts=backend.shares_prompts)
    sharding = msgspec.structs.replace(sharding, num_ranks=backend.data_parallel_size)
    table, streamed = table_of(batch), StreamedGradient(backend, config, keeps_logprobs=True)
    rank_S = np.full(len(table), -1, dtype=np.int32)

    def shard_of(some: SampleBatch, rows: NDArray[Any]) -> SampleBatch:
        mine = rows[some.rank_S == backend.data_parallel_rank]
        samples = batch.take(mine)
        loss_mask_T = samples.loss_mask_T & np.repeat(some.num_valid_S[some.rank_S == rank] > 0, samples.lengths_S)
        return samples.replace(**some.take(some.rows_of(rank)).columns, loss_mask_T=loss_mask_T).attach_sources(
            some.sources
        )

    for groups in parts:
        rows = np.flatnonzero(np.isin(table.group_S, groups))
        part = sharding.shard(table.take(rows))
        rank_S[rows] = part.rank_S
        streamed.begin(1)
        assert streamed.add(part, shard_of(part, rows)) == part.num_valid_S.sum()
    rest = np.flatnonzero(rank_S < 0)
    if len(rest):
        rank_S[rest] = sharding.shard(table.take(rest)).rank_S
    table = table.replace(rank_S=rank_S, **final)
    gradients: dict[str, NDArray[Any]] = {}

    def note(*_: Any) -> None:
        parameters = backend.policy.parameters.items()
        gradients.update({name: whole(each.grad) for name, each in parameters if each.grad is not None})

    backend.policy.optimizer.register_step_pre_hook(note)
    samples = shard_of(table, np.arange(len(table)))
    train = streamed.train if parts else step.train
    result = train(backend, table, samples, config, keeps_logprobs=True)
    assert all(parameter.grad is None for parameter in backend.policy.parameters.values())
    assert result.logprobs is not None
    weights = {name: whole(parameter) for name, parameter in backend.policy.parameters.items()}
    return Stepped(result.metrics, gradients, weights, result.logprobs(), table.rows_of(rank))


def compare(
    folder: Path,
    world_size: int = 1,
    parts: Sequence[Sequence[int]] = PARTS,
    final: Mapping[str, NDArray[Any]] = {},
    advantage: float | None = None,
    **settings: Any,
) -> Stepped:
    """Assert that a step is the same with streaming; return what its first rank says with it."""
    policy = {"train_global_batch_size": NUM_GROUPS * NUM_SAMPLES, **settings.pop("policy", {})}
    size = {"num_prompts_per_step": NUM_GROUPS, "num_generations_per_prompt": NUM_SAMPLES}
    config = make_config(make_model(folder / "model"), grpo=size, trainers=world_size, **settings, **policy)
    batch = make_groups(*[NUM_SAMPLES] * NUM_GROUPS, seed=4, max_response=18)
    if advantage is not None:
        batch.advantages_S[3 * NUM_SAMPLES] = advantage
    plain, streamed = (run_ranks(world_size, take_step, config, batch, each, final) for each in ([], parts))
    starts = batch.offsets()
    by_row: list[dict[int, NDArray[Any]]] = []
    for ranks in (plain, streamed):
        by_row.append({})
        for stepped in ranks:
            pieces = np.split(stepped.logprobs_T, np.cumsum(np.diff(starts)[stepped.rows])[:-1])
            by_row[-1].update(zip(stepped.rows.tolist(), pieces, strict=True))
    assert by_row[0].keys() == by_row[1].keys() == {*range(len(batch))}
    for row, logprobs_T in by_row[0].items():
        np.testing.assert_allclose(by_row[1][row], logprobs_T, **CLOSE)
    metrics = dict(streamed[0].metrics)
    assert metrics.pop("streamed_s") >= 0
    share = metrics.pop("streamed_share")
    assert metrics == pytest.approx(plain[0].metrics, rel=1e-5, abs=1e-6)
    for name, gradient in plain[0].gradients.items():
        np.testing.assert_allclose(streamed[0].gradients[name], gradient, **CLOSE)
        np.testing.assert_allclose(streamed[0].weights[name], plain[0].weights[name], rtol=1e-5, atol=1e-5)
    assert any(gradient.any() for gradient in plain[0].gradients.values())
    return msgspec.structs.replace(streamed[0], metrics=metrics | {"streamed_share": share})


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "loss",
    [
        WEIGHTED,
        {**WEIGHTED, "token_level_loss": False},
        {"sequence_level_importance_ratios": True, "token_level_loss": False},
        {"loss_type": "dr_grpo"},
        {"reference_policy_kl_penalty": 0.3, "entropy_coef": 0.1},
    ],
    ids=lambda loss: " ".join(loss),
)
def test_the_step_is_that_of_the_whole_batch(tmp_path: Path, loss: dict[str, Any], world_size: int) -> None:
    streamed = compare(tmp_path, world_size, loss=loss)
    counted = table_of(make_groups(*[NUM_SAMPLES] * NUM_GROUPS, seed=4, max_response=18))
    is_streamed = np.isin(counted.group_S, [0, 1, 3])
    share = counted.num_valid_S[is_streamed].sum() / counted.num_valid_S.sum()
    assert streamed.metrics["streamed_share"] == pytest.approx(share)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "policy",
    [
        {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}},
        {"share_prompts": False, "max_grad_norm": None},
        {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}},
    ],
    ids=lambda policy: next(iter(policy)),
)
def test_however_sequences_are_laid_out(tmp_path: Path, policy: dict[str, Any], world_size: int) -> None:
    assert compare(tmp_path, world_size, policy=policy).metrics["streamed_share"] > 0.3


def test_nothing_need_be_left_for_the_end(tmp_path: Path) -> None:
    assert compare(tmp_path, 2, ([0, 1, 2, 3], [4, 5])).metrics["streamed_share"] == 1.0


@pytest.mark.parametrize("column", ["command_S", "advantages_S", "num_valid_S"])
def test_what_the_whole_batch_has_otherwise_is_computed_again(tmp_path: Path, column: str) -> None:
    table = table_of(make_groups(*[NUM_SAMPLES] * NUM_GROUPS, seed=4, max_response=18))
    changed_S = table.columns[column].copy()
    changed_S[table.group_S == 3] = 0 if column == "num_valid_S" else 77  # generated again, or set aside
    streamed = compare(tmp_path, 2, final={column: changed_S})
    assert streamed.metrics["streamed_share"] == 0.0


def test_a_step_that_would_not_be_finite_is_computed_again_without_the_group(tmp_path: Path) -> None:
    streamed = compare(tmp_path, advantage=3e38)
    assert streamed.metrics["streamed_share"] == 0.0
    assert streamed.metrics["groups_set_aside/loss"] == 1.0
