"""Rows for Megatron-Core: every context-parallel rank has as many tokens as its kernels take."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from packing_harness import CPU, batch_of

from tandem.trainer.batching.shard import pad

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed")
BATCH = batch_of("..xx", ".x", "..x", "..xxx")


def rows_of(*args: Any, **given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tandem.trainer.backends.megatron.rows import rows_of
    return rows_of(*args, **given)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("size", "divisor"), [(1, 16), (1, 128), (2, 4 * 32), (2, 4 * 2 * 16)])
def test_the_last_segment_is_padding_that_scores_nothing(packs: bool, size: int, divisor: int) -> None:
    groups = ([0, 1, 2], [3])
    divisible_by = 2 * size if size > 1 else 1
    batches = [
        pad(BATCH, rows, divisible_by=divisible_by, device=CPU, row_divisible_by=1 if packs else None)
        for rows in groups
    ]
    valid: list[list[int]] = [[], []]
    for rank in range(size):
        plain = rows_of(batches, rank, size, round_to=1, equal=False)
        rounded = rows_of(batches, rank, size, round_to=1, equal=False, divisor=divisor)
        for number, (before, after) in enumerate(zip(plain, rounded, strict=True)):
            lengths = after.sequences.lengths
            assert lengths[:-1] == before.sequences.lengths
            assert sum(lengths) == divisor
            assert after.token_ids_1M.numel() == divisor // size
            assert after.sequences.cu_seqlens_q.tolist()[-1] == divisor
            taken = after.token_ids_1M[0, after.predictor_L]
            assert torch.equal(taken, before.token_ids_1M[0, before.predictor_L])
            assert torch.equal(after.valid_L, before.valid_L)
            valid[number] += after.valid_L.tolist()
    assert [sorted(each) for each in valid] == [list(range(int(each.loss_mask_BT.sum()))) for each in batches]


def test_rows_of_equal_length_are_rounded_up_once() -> None:
    batches = [pad(BATCH, rows, divisible_by=1, device=CPU, row_divisible_by=1) for rows in ([0, 1, 2], [3])]
    rows = rows_of(batches, 0, 1, round_to=4, equal=True, divisor=8)
    assert [sum(row.sequences.lengths) for row in rows] == [16, 16, 16, 16]
    assert [row.batch is None for row in rows] == [False, False, True, True]


def test_rows_that_fit_are_left_as_they_are() -> None:
    (batch,) = [pad(BATCH, [0, 1, 2, 3], divisible_by=4, device=CPU, row_divisible_by=1)]
    (row,) = rows_of([batch], 0, 1, round_to=1, equal=False, divisor=4)
    assert row.sequences.lengths == (4, 4, 4, 8)
