"""Sequences end to end in one row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_harness import CPU, batch_of

from tandem.samples.batch_sharding import EMPTY_ROW
from tandem.trainer.batching.shard import pad


def test_segments_lie_end_to_end_and_each_is_rounded_up() -> None:
    micro = pad(batch_of("..xx", ".x", "..x"), (2, EMPTY_ROW, 0), divisible_by=4, device=CPU, row_divisible_by=1)
    packed = micro.row
    assert packed is not None
    assert packed.token_ids_1N.tolist() == [[7, 8, 9, 0, 1, 2, 3, 4]]
    assert packed.position_ids_1N.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.lengths == (4, 4)
    assert packed.predictor_K.tolist() == [1, 5, 6]
    assert micro.token_ids_BT.shape == (3, 4), "the loss sees the samples, whatever the model sees"


def test_the_row_is_rounded_up_with_a_segment_of_padding() -> None:
    packed = pad(batch_of("..x", "x"), (0, 1), divisible_by=2, device=CPU, row_divisible_by=16).row
    assert packed is not None
    assert packed.lengths == (4, 2, 10)
    assert packed.position_ids_1N[0, 6:].tolist() == list(range(10))
    assert packed.token_ids_1N[0, 6:].tolist() == [1] * 10, "a real token: the embedding of padding may be zero"


@pytest.mark.parametrize("rows", [(EMPTY_ROW,), (EMPTY_ROW, EMPTY_ROW)])
def test_a_row_of_nothing_is_one_segment(rows: tuple[int, ...]) -> None:
    packed = pad(batch_of(".x"), rows, divisible_by=2, device=CPU, row_divisible_by=3).row
    assert packed is not None
    assert packed.lengths == (6,)
    assert packed.token_ids_1N.tolist() == [[1] * 6]
    assert packed.predictor_K.tolist() == []


@settings(max_examples=200, deadline=None)
@given(
    masks=st.lists(st.text("x.", min_size=1, max_size=12), min_size=1, max_size=8),
    divisible_by=st.integers(1, 5),
    row_divisible_by=st.integers(1, 9),
    data=st.data(),
)
def test_every_token_has_its_place(
    masks: list[str], divisible_by: int, row_divisible_by: int, data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(range(len(masks))))
    micro = pad(batch_of(*masks), rows, divisible_by=divisible_by, device=CPU, row_divisible_by=row_divisible_by)
    packed = micro.row
    assert packed is not None
    assert sum(packed.lengths) == packed.token_ids_1N.shape[1] == packed.position_ids_1N.shape[1]
    assert all(length % divisible_by == 0 for length in packed.lengths)
    assert sum(packed.lengths) % np.lcm(divisible_by, row_divisible_by) == 0
    for segment, positions, token_ids, length in zip(
        packed.token_ids_1N[0].split(packed.lengths),
        packed.position_ids_1N[0].split(packed.lengths),
        micro.token_ids_BT,
        micro.lengths_B.tolist(),
        strict=False,  # the last segment may be padding
    ):
        assert segment[:length].tolist() == token_ids[:length].tolist()
        assert not segment[length:].any()
        assert positions.tolist() == list(range(len(positions)))
    counted = micro.loss_mask_BT
    predictors = micro.token_ids_BT.roll(1, dims=1)[counted]
    assert torch.equal(packed.token_ids_1N[0, packed.predictor_K], predictors)
