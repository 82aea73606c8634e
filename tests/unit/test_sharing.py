"""Prompts computed once: who shares one, the row that holds them, and who keeps company when sequences are dealt."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.samples.batch import SampleBatch, build_given_table
from tandem.samples.batch_sharding import EMPTY_ROW, NO_PROMPT, group_by_prompt, shards_by_count
from tandem.trainer.batching.packing import prompts_of
from tandem.trainer.batching.shard import micro_batches_of, pad

CPU = torch.device("cpu")


def batch_of(*sequences: str) -> SampleBatch:
    """One sequence a string: lower-case letters are prompt tokens, capital ones count; the ids are character codes."""
    text = "".join(sequences)
    batch = SampleBatch(
        lengths_S=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        token_ids_T=np.array([ord(token) for token in text], dtype=np.int32),
        loss_mask_T=np.array([token.isupper() for token in text]),
        generation_logprobs_T=np.zeros(len(text), dtype=np.float32),
        advantages_S=np.zeros(len(sequences), dtype=np.float32),
        rewards_S=np.zeros(len(sequences), dtype=np.float32),
    )
    return batch.replace(**build_given_table(batch).columns)


def text_of(token_ids: torch.Tensor) -> str:
    return "".join(map(chr, token_ids.flatten().tolist()))


def test_sequences_share_what_comes_before_the_first_counted_token() -> None:
    batch = batch_of("abXY", "acX", "abZ", "abcX", "ab", "X", "XY")
    prompt_B, lengths_B = prompts_of(batch, range(7))
    assert prompt_B.tolist() == [0, 1, 0, 3, 0, 5, 5]
    assert lengths_B.tolist() == [2, 2, 2, 3, 2, 1, 1]


def test_the_row_holds_each_prompt_once_and_nothing_that_predicts_nothing() -> None:
    batch = batch_of("abXYZ", "abVW", "acXsTu", "acU")
    micro = pad(batch, (0, 1, 2, 3, EMPTY_ROW), divisible_by=1, device=CPU, shares_prompts=True)
    shared = micro.row
    assert shared is not None
    # Of "abXYZ" the last token, of "acXsTu" the last two, and of "acU" the whole response predict nothing counted.
    assert text_of(shared.token_ids_1N) == "abXY" + "V" + "acXs"
    assert shared.position_ids_1N.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3]]
    assert shared.source_BW.tolist() == [[0, 1, 2, 3], [0, 1, 4, 0], [5, 6, 7, 8], [5, 6, 0, 0], [0, 0, 0, 0]]
    assert shared.source_BW.flatten()[shared.taken_N].tolist() == list(range(9)), "each takes back what is its own"
    assert text_of(shared.token_ids_1N[0, shared.predictor_K]) == "bXY" + "bV" + "cs" + "c"
    assert text_of(micro.token_ids_BT[micro.loss_mask_BT]) == "XYZ" + "VW" + "XT" + "U"


def test_the_row_is_rounded_up() -> None:
    batch = batch_of("abXYZ", "abVW")
    micro = pad(batch, (0, 1), divisible_by=8, device=CPU, shares_prompts=True)
    assert micro.row is not None
    assert micro.row.token_ids_1N.shape == micro.row.taken_N[None].shape == (1, 8)


def test_a_prompt_is_owned_by_a_sample_that_has_a_response() -> None:
    batch = batch_of("ab", "abX", "abY")
    micro = pad(batch, (0, 1, 2), divisible_by=1, device=CPU, shares_prompts=True)
    assert micro.row is not None
    assert text_of(micro.row.token_ids_1N) == "ab"
    assert micro.row.predictor_K.tolist() == [1, 1]


def test_samples_where_nothing_counts_make_a_row_of_padding() -> None:
    batch = batch_of("ab", "ab")
    micro = pad(batch, (0, 1), divisible_by=1, device=CPU, shares_prompts=True)
    assert micro.row is not None
    assert micro.row.token_ids_1N.tolist() == [[0]]
    assert micro.row.predictor_K.tolist() == []


def test_sequences_without_a_common_prompt_share_nothing() -> None:
    batch = batch_of("abXYZ", "acVW")
    assert pad(batch, (0, 1), divisible_by=1, device=CPU, shares_prompts=True).row is None
    assert pad(batch, (0, 0), divisible_by=1, device=CPU).row is None


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    num_ranks=st.integers(1, 5),
    size=st.integers(1, 8),
    data=st.data(),
)
def test_hands_are_equal_whatever_the_groups(sizes: list[int], num_ranks: int, size: int, data: st.DataObject) -> None:
    num = sum(sizes)
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=num, max_size=num))
    firsts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    hands = shards_by_count(range(num), lengths, num_ranks, firsts)
    assert sorted(row for hand in hands for row in hand if row != EMPTY_ROW) == list(range(num))
    assert {len(hand) for hand in hands} == {-(-num // num_ranks)}
    groups = [micro_batches_of(hand, lengths, size, firsts) for hand in hands]
    assert len({len(group) for group in groups}) == 1, "a rank with fewer passes would leave the others waiting"
    for hand, group in zip(hands, groups, strict=True):
        assert sorted(row for rows in group for row in rows) == sorted(hand)
    if len(set(sizes)) == 1 and len(sizes) % num_ranks == 0:
        whole = [{int(firsts[row]) for row in hand} for hand in hands]
        assert sum(len(held) for held in whole) == len(sizes), "no group is split over ranks"


def test_groups_are_dealt_whole_and_lie_side_by_side() -> None:
    prompt_S = np.array([0, 1, 0, 1, 4, 4, 6, 6])
    lengths = [9, 5, 1, 5, 2, 2, 3, 4]
    hands = shards_by_count(range(8), lengths, 2, prompt_S)
    assert hands == [[0, 2, 4, 5], [1, 3, 7, 6]]
    assert micro_batches_of(hands[0], lengths, 2, prompt_S) == [(0, 2), (4, 5)]


def test_a_sequence_that_shares_its_prompt_with_no_other_stays_alone() -> None:
    prompt_S = np.array([NO_PROMPT, 0, NO_PROMPT, 0], dtype=np.int32)
    assert group_by_prompt(range(4), [5, 4, 3, 2], prompt_S) == [[0], [1, 3], [2]]
    batch = batch_of("aX", "abX", "aX", "abY").replace(prompt_S=prompt_S)
    numbers = prompts_of(batch, range(4))[0].tolist()
    assert numbers[1] == numbers[3]
    assert len(set(numbers)) == 3
