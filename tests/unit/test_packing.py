"""Who trains on what: the ranks' shares and the padded micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_harness import CPU, batch_of

from tandem.config.schema.columns import ADVANTAGES, GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import EMPTY_ROW, batches_of_samples, shards_by_count
from tandem.trainer.batching.shard import micro_batches_of, pad, unpad_into
from tandem.trainer.micro_batches import Columns


def columns_of(batch: SampleBatch) -> Columns:
    """Return what comes with a batch."""
    return {column: batch.of_tokens(column.name) for column in (GENERATION_LOGPROBS, ADVANTAGES)}


def test_padding_goes_right_and_every_field_lands_where_its_token_does() -> None:
    batch = batch_of("..xx", ".x", "..x")
    micro = pad(batch, (2, 0), divisible_by=1, device=CPU, columns=columns_of(batch))
    assert micro.rows == (2, 0)
    assert micro.lengths_B.tolist() == [3, 4]
    assert micro.token_ids_BT.tolist() == [[7, 8, 9, 0], [1, 2, 3, 4]]
    assert micro.token_ids_BT.dtype == torch.int64
    assert micro.attention_mask_BT.tolist() == [[True, True, True, False], [True] * 4]
    assert micro.loss_mask_BT.tolist() == [[False, False, True, False], [False, False, True, True]]
    assert micro.generation_logprobs_BT.tolist() == [[-7, -8, -9, 0], [-1, -2, -3, -4]]
    assert micro.advantages_BT.tolist() == [[1, 1, 1, 0], [-1, -1, -1, -1]]
    assert micro.previous_logprobs_BT is None
    assert micro.reference_logprobs_BT is None


@pytest.mark.parametrize(("divisible_by", "width"), [(1, 5), (4, 8), (5, 5), (64, 64)])
def test_the_width_is_rounded_up(divisible_by: int, width: int) -> None:
    micro = pad(batch_of("..xxx", "x"), (0, 1), divisible_by=divisible_by, device=CPU)
    assert micro.token_ids_BT.shape == (2, width)


def test_the_first_token_of_a_sequence_never_counts() -> None:
    batch = batch_of("xxx", "x", ".x")
    assert batch.valid().tolist() == [False, True, True, False, False, True]
    assert batch.num_valid().tolist() == [2, 0, 1]
    assert batch.loss_mask_T[0], "the batch itself is left as it was"


def test_an_empty_row_holds_nothing_and_counts_nowhere() -> None:
    batch = batch_of(".x")
    micro = pad(batch, (0, EMPTY_ROW), divisible_by=4, device=CPU, columns=columns_of(batch))
    assert micro.lengths_B.tolist() == [2, 0]
    assert not micro.attention_mask_BT[1].any()
    assert not micro.loss_mask_BT[1].any()
    assert not micro.advantages_BT[1].any()


def test_a_micro_batch_of_empty_rows_still_has_a_width() -> None:
    assert pad(batch_of(".x"), (EMPTY_ROW,), divisible_by=1, device=CPU).token_ids_BT.shape == (1, 1)


def test_unpadding_undoes_padding() -> None:
    batch = batch_of("..xx", ".x", "..x")
    values_T = np.zeros(9, dtype=np.float32)
    for rows in [(2, EMPTY_ROW), (0, 1)]:
        micro = pad(batch, rows, divisible_by=8, device=CPU, columns=columns_of(batch))
        unpad_into(values_T, micro.generation_logprobs_BT, batch, rows)
    assert values_T.tolist() == batch.generation_logprobs_T.tolist()


def test_scores_of_the_ragged_batch_are_padded_beside_their_tokens() -> None:
    scores_T = np.arange(6, dtype=np.float32)
    micro = pad(
        batch_of("..xx", ".x"),
        (1, 0),
        divisible_by=1,
        device=CPU,
        columns={PREVIOUS_LOGPROBS: scores_T, REFERENCE_LOGPROBS: -scores_T},
    )
    assert micro.previous_logprobs_BT is not None
    assert micro.reference_logprobs_BT is not None
    assert micro.previous_logprobs_BT.tolist() == [[4, 5, 0, 0], [0, 1, 2, 3]]
    assert micro.reference_logprobs_BT.tolist() == [[-4, -5, 0, 0], [0, -1, -2, -3]]


@pytest.mark.parametrize(
    ("num_sequences", "size", "expected"),
    [(8, 4, [range(4), range(4, 8)]), (5, 4, [range(4), range(4, 5)]), (3, 8, [range(3)])],
)
def test_global_batches_are_consecutive(num_sequences: int, size: int, expected: list[range]) -> None:
    assert batches_of_samples(np.zeros(num_sequences), size) == expected


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    num_ranks=st.integers(1, 9),
    size=st.integers(1, 8),
)
def test_every_sequence_is_dealt_once_in_equal_and_even_shares(lengths: list[int], num_ranks: int, size: int) -> None:
    hands = shards_by_count(range(len(lengths)), lengths, num_ranks)
    dealt = [row for hand in hands for row in hand if row != EMPTY_ROW]
    assert sorted(dealt) == list(range(len(lengths)))
    assert len({len(hand) for hand in hands}) == 1
    assert len(hands[0]) == -(-len(lengths) // num_ranks)
    tokens = [sum(lengths[row] for row in hand if row != EMPTY_ROW) for hand in hands]
    # Dealt back and forth, two hands differ by no more than the longest sequence.
    assert max(tokens) - min(tokens) <= max(lengths)

    groups = [micro_batches_of(hand, lengths, size) for hand in hands]
    assert len({len(group) for group in groups}) == 1, "a rank with fewer passes would leave the others waiting"
    for hand, group in zip(hands, groups, strict=True):
        assert sorted(row for rows in group for row in rows) == sorted(hand)
        assert all(1 <= len(rows) <= size for rows in group)


def test_like_lengths_share_a_micro_batch() -> None:
    assert micro_batches_of(range(6), [9, 1, 8, 2, 7, 3], 3) == [(0, 2, 4), (5, 3, 1)]


def test_dealing_is_even_where_it_can_be() -> None:
    assert shards_by_count(range(4), [10, 20, 30, 40], 2) == [[3, 0], [2, 1]]
    assert shards_by_count([4, 5, 6], [0, 0, 0, 0, 7, 7, 7], 2) == [[4, EMPTY_ROW], [5, 6]]
