"""Micro-batches by sequences and by tokens: what every rank gets, and that all get as many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config import build_config
from tandem.config.schema import PolicyConfig
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import EMPTY_ROW, BatchSharding, batches_of_samples, shards_by_tokens
from tandem.trainer.backend import ModelReplicas
from tandem.trainer.batching.shard import BatchShard
from tandem.trainer.micro_batches import Groups

MODES = ("sequences", "dynamic", "packed")


def policy_of(mode: str, *, num_tokens: int = 64, size: int = 4, **settings: Any) -> PolicyConfig:
    policy: dict[str, Any] = {"model_name": "model", "max_total_sequence_length": num_tokens, **settings}
    policy |= {"train_micro_batch_size": size, "logprob_batch_size": size}
    limits = {"enabled": True, "train_mb_tokens": num_tokens, "logprob_mb_tokens": 2 * num_tokens}
    if mode != "sequences":
        policy |= {{"dynamic": "dynamic_batching", "packed": "sequence_packing"}[mode]: limits}
    data = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
    return build_config({"grpo": {}, "policy": policy, "data": data}).policy


def ranks_of(
    policy: PolicyConfig, lengths: list[int], num_ranks: int, *, unit: int = 1, batch_size: int = 1000, divisor: int = 1
) -> list[BatchShard]:
    lengths_S = np.array(lengths, dtype=np.int32)
    sharding = BatchSharding(
        num_ranks=num_ranks,
        batch_size=batch_size,
        unit=unit,
        by_tokens=policy.sequence_packing.enabled or policy.dynamic_batching.enabled,
        by_prompts=False,
    )
    rank_S = sharding.ranks(lengths_S, np.zeros(len(lengths), dtype=np.int32))
    return shards_of(policy, SampleBatch(lengths_S=lengths_S, rank_S=rank_S), num_ranks, unit, divisor)


def shards_of(
    policy: PolicyConfig, whole: SampleBatch, num_ranks: int, unit: int = 1, divisor: int = 1
) -> list[BatchShard]:
    replicas = [
        ModelReplicas(sizes=(num_ranks,), rank=rank, size=num_ranks, sequence_divisor=divisor, sum=torch.Tensor.clone)
        for rank in range(num_ranks)
    ]
    return [BatchShard(policy, whole, whole.take(whole.rows_of(each.rank)), each, unit=unit) for each in replicas]


def rows_of(groups: Groups) -> list[int]:
    return [row for group in groups for row in group if row != EMPTY_ROW]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 32), st.integers(1, 32)), min_size=1, max_size=20),
    num_ranks=st.integers(1, 4),
    unit=st.sampled_from([1, 2]),
    divisible_by=st.integers(1, 3),
)
def test_all_ranks_have_as_many_micro_batches_and_together_everything_once(
    mode: str, pairs: list[tuple[int, int]], num_ranks: int, unit: int, divisible_by: int
) -> None:
    lengths = [length for pair in pairs for length in pair]
    policy = policy_of(mode, make_sequence_length_divisible_by=divisible_by)
    half = len(pairs) // 2 * 2
    ranks = ranks_of(policy, lengths, num_ranks, unit=unit, batch_size=half or 1000)
    batches = batches_of_samples(np.zeros(len(lengths)), half or 1000)
    for batch in batches:
        groups = [rank.training(batch) for rank in ranks]
        assert len({len(group) for group in groups}) == 1, "a rank with fewer passes would leave the others waiting"
        assert sorted(row for group in groups for row in rows_of(group)) == list(batch)
    scored = [rank.scoring(batches) for rank in ranks]
    assert len({len(group) for group in scored}) == 1
    for rank, group in zip(ranks, scored, strict=True):
        mine = sorted(row for batch in batches for row in rows_of(rank.training(batch)))
        assert sorted(rows_of(group)) == mine, "a rank scores what it trains on"


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20))
def test_units_stay_together_in_order(mode: str, pairs: list[tuple[int, int]]) -> None:
    lengths = [length for pair in pairs for length in pair]
    for rank in ranks_of(policy_of(mode), lengths, 3, unit=2):
        for group in rank.training(range(len(lengths))):
            assert len(group) % 2 == 0
            for first, second in zip(group[::2], group[1::2], strict=True):
                assert (first, second) == (EMPTY_ROW, EMPTY_ROW) or (first % 2 == 0 and second == first + 1)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40), num_ranks=st.integers(1, 4))
def test_packed_rows_keep_to_their_tokens(lengths: list[int], num_ranks: int) -> None:
    for rank in ranks_of(policy_of("packed"), lengths, num_ranks, divisor=4):
        assert (rank.divisible_by, rank.row_divisible_by) == (4, 64)
        for group in rank.training(range(len(lengths))):
            segments = [-(-lengths[row] // 4) * 4 for row in group if row != EMPTY_ROW]
            assert sum(segments) <= 64


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 128), min_size=1, max_size=40), num_ranks=st.integers(1, 4))
def test_padded_rows_keep_to_their_tokens(lengths: list[int], num_ranks: int) -> None:
    for rank in ranks_of(policy_of("dynamic", num_tokens=192), lengths, num_ranks):
        assert (rank.divisible_by, rank.row_divisible_by) == (64, None)
        for group in rank.training(range(len(lengths))):
            width = max(-(-lengths[row] // 64) * 64 if row != EMPTY_ROW else 1 for row in group)
            assert len(group) * width <= 192


def test_what_rounding_adds_keeps_no_sequence_out() -> None:
    (rank,) = ranks_of(policy_of("packed", num_tokens=50), [50, 20, 20], 1, divisor=16)
    assert sorted(map(sorted, rank.training(range(3)))) == [[0], [1, 2]]


def test_like_lengths_share_padded_rows_and_scoring_takes_more_of_them() -> None:
    lengths = [10, 60, 100, 20, 70, 30]
    (rank,) = ranks_of(policy_of("dynamic", num_tokens=128), lengths, 1)
    assert rank.training(range(6)) == [(2,), (4,), (1, 5), (3, 0)]
    assert rank.scoring([range(6)]) == [(2, 4), (1, 5, 3, 0)]


def test_where_another_model_is_packed_ranks_with_more_sequences_do_not_wait_for_more_micro_batches() -> None:
    """Whoever is batched by tokens decides who has which sequences; for the other these are unequal numbers."""
    lengths_S = np.array([12, 3, 3, 3, 3], dtype=np.int32)
    shares = shards_by_tokens(range(5), lengths_S.astype(np.int64), 2)
    assert sorted(map(len, shares)) == [1, 4]
    rank_S = np.array([int(row in shares[1]) for row in range(5)], dtype=np.int32)
    policy = policy_of("sequences", size=2)
    ranks = shards_of(policy, SampleBatch(lengths_S=lengths_S, rank_S=rank_S), 2)
    for groups in ([each.training(range(5)) for each in ranks], [each.scoring([range(5)]) for each in ranks]):
        assert [len(group) for group in groups] == [2, 2]
        assert sorted(row for group in groups for row in rows_of(group)) == [0, 1, 2, 3, 4]


def test_a_rank_without_sequences_takes_part_with_empty_rows() -> None:
    for mode in MODES:
        groups = [rank.training(range(2)) for rank in ranks_of(policy_of(mode), [40, 40], 3)]
        assert groups[2] == [(EMPTY_ROW,)]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60), num_ranks=st.integers(1, 9))
def test_tokens_are_dealt_evenly(lengths: list[int], num_ranks: int) -> None:
    hands = shards_by_tokens(range(len(lengths)), np.array(lengths), num_ranks)
    assert sorted(row for hand in hands for row in hand) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= max(lengths)
