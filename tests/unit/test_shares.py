"""Who trains on what, worked out by the coordinator: the same as every rank would, and in one table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import WireError
from tandem.config import build_config
from tandem.coordinator.loop.loop import shards_of
from tandem.samples.batch import TABLE, TOKENS, SampleBatch, build_given_table
from tandem.samples.batch_sharding import BatchSharding, batches_of_samples, data_parallel_ranks


def config_of(trainers: int, **policy: Any) -> Any:
    return build_config(
        {
            "algorithm": "dpo",
            "dpo": {"val_global_batch_size": 8 * trainers},
            "policy": {"model_name": "model", "train_global_batch_size": 8, "train_micro_batch_size": 1, **policy},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "no"},
            "cluster": {"trainers": trainers},
        }
    )


MEGATRON = {"enabled": True, "optimizer": {"optimizer": "adam", "lr": 1e-3}}


@pytest.mark.parametrize(
    ("policy", "trainers", "ranks"),
    [
        ({}, 4, [0, 1, 2, 3]),
        ({"dtensor_cfg": {"tensor_parallel_size": 2}}, 4, [0, 0, 1, 1]),
        ({"dtensor_cfg": {"tensor_parallel_size": 2, "context_parallel_size": 2}}, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        # Pipeline stages come last: the first stages of all replicas, then the second ones.
        ({"megatron_cfg": {**MEGATRON, "pipeline_model_parallel_size": 2}}, 8, [0, 1, 2, 3, 0, 1, 2, 3]),
        (
            {"megatron_cfg": {**MEGATRON, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}},
            8,
            [0, 0, 1, 1, 0, 0, 1, 1],
        ),
    ],
)
def test_trainers_of_one_replica_have_one_rank(policy: dict[str, Any], trainers: int, ranks: list[int]) -> None:
    assert data_parallel_ranks(config_of(trainers, **policy)) == ranks


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    by_tokens=st.booleans(),
    batch_size=st.integers(1, 12),
)
def test_every_sequence_has_one_rank_and_shares_of_a_global_batch_are_even(
    lengths: list[int], num_ranks: int, by_tokens: bool, batch_size: int
) -> None:
    sharding = BatchSharding(num_ranks=num_ranks, batch_size=batch_size, unit=1, by_tokens=by_tokens, by_prompts=True)
    lengths_S = np.array(lengths, dtype=np.int32)
    rank_S = sharding.ranks(lengths_S, np.arange(len(lengths), dtype=np.int32) // 3)
    assert rank_S.min() >= 0
    assert rank_S.max() < num_ranks
    for rows in batches_of_samples(np.zeros(len(lengths)), batch_size):
        counts = np.bincount(rank_S[list(rows)], minlength=num_ranks)
        tokens = np.bincount(rank_S[list(rows)], lengths_S[list(rows)], minlength=num_ranks)
        if by_tokens:
            assert tokens.max() - tokens.min() <= lengths_S[list(rows)].max()
        else:
            assert counts.max() <= -(-len(rows) // num_ranks)


def batch_of(num_pairs: int, seed: int = 0) -> SampleBatch:
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 9, 2 * num_pairs).astype(np.int32)
    mask_T = np.concatenate([np.arange(length) >= 2 for length in lengths])
    return SampleBatch(
        lengths_S=lengths,
        token_ids_T=random.integers(3, 20, len(mask_T)).astype(np.int32),
        loss_mask_T=mask_T,
        generation_logprobs_T=np.zeros(len(mask_T), dtype=np.float32),
        advantages_S=np.ones(2 * num_pairs, dtype=np.float32),
        rewards_S=np.zeros(2 * num_pairs, dtype=np.float32),
    )


def test_ranks_get_their_own_tokens_and_pairs_stay_together() -> None:
    config = config_of(3, train_global_batch_size=9)
    batch = batch_of(9)
    batch = batch.replace(**build_given_table(batch).columns)
    table = BatchSharding.of(config, shares_prompts=True).shard(batch)
    assert (table.rank_S[::2] == table.rank_S[1::2]).all()
    shares = shards_of(table, 3)
    for rank, frames in enumerate(shares):
        rows = table.rows_of(rank)
        given_tokens = SampleBatch.parse_frames(
            {"lengths_S": table.lengths_S[rows], **frames}, TOKENS, may_be_empty=True
        )
        given_tokens.check_tokens(20, table.num_valid_S[rows])
        np.testing.assert_array_equal(given_tokens.token_ids_T, batch.take(rows).token_ids_T)
    assert sum(len(frames["token_ids_T"]) for frames in shares) == len(batch.token_ids_T)
    lengths_S = table.lengths_S[table.rows_of(0)]
    with pytest.raises(WireError, match="token_ids_T"):
        SampleBatch.parse_frames({"lengths_S": lengths_S, **shares[1], "token_ids_T": np.zeros(3, np.int32)}, TOKENS)


def test_parts_that_are_evaluated_by_themselves_are_assigned_by_themselves() -> None:
    sharding = BatchSharding.of(config_of(2), shares_prompts=True)
    batch = batch_of(5)
    parts = [4, 6]
    together = sharding.shard(build_given_table(batch), parts)
    apart = [sharding.shard(build_given_table(batch.take(rows))) for rows in (slice(4), slice(4, 10))]
    assert together.rank_S.tolist() == [*apart[0].rank_S.tolist(), *apart[1].rank_S.tolist()]


def test_a_table_survives_the_wire_and_what_is_none_is_refused() -> None:
    table = build_given_table(batch_of(2))
    again = SampleBatch.parse_frames(table.columns, TABLE)
    again.check_table(num_ranks=1)
    for name, array in table.columns.items():
        np.testing.assert_array_equal(again.columns[name], array)
    with pytest.raises(WireError, match=r"^rank_S: is missing$"):
        SampleBatch.parse_frames({name: array for name, array in table.columns.items() if name != "rank_S"}, TABLE)
    with pytest.raises(WireError, match=r"^group_S: 3 numbers, does not fit the 4 sequences$"):
        SampleBatch.parse_frames(table.columns | {"group_S": np.zeros(3, np.int32)}, TABLE)
    nan_S = np.array([1, 1, np.nan, 1], dtype=np.float32)
    with pytest.raises(WireError, match=r"^rewards_S: nan for sequence 2, must be finite$"):
        table.replace(rewards_S=nan_S).check_table(num_ranks=1)
    with pytest.raises(WireError, match=r"^source_S: -1 for sequence 0, must be from 0 to 1$"):
        table.attach_sources(("a", "b")).check_table(num_ranks=1)
