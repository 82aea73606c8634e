"""Tables of tiles, run by a few lines of ctypes instead of a GPU, copy what torch copies."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.refit.transports import gpu_copy
from tandem.refit.transports.gpu_copy import CopyTiles, group_by_types, lay_out, rows_of, tiles

NUMBERS = {8: ctypes.c_int64, 4: ctypes.c_int32, 2: ctypes.c_int16, 1: ctypes.c_int8}


def run_kernel(table: CopyTiles, to_size: int, from_size: int, convert: bool) -> None:
    """Do what `gpu_kernels.copy_tiles` does, word by word; `convert` is float32 to float64."""
    to_type = ctypes.c_double if convert else NUMBERS[to_size]
    from_type = ctypes.c_float if convert else NUMBERS[from_size]
    for to, from_, num_rows, num_columns, to_row, from_row, to_column, from_column in rows_of(table).tolist():
        for index in range(num_rows * num_columns):
            row, column = divmod(index, num_columns)
            word = from_type.from_address(from_ + (row * from_row + column * from_column) * from_size).value
            to_type.from_address(to + (row * to_row + column * to_column) * to_size).value = word


@st.composite
def pairs(draw: st.DrawFn, to: torch.dtype, from_: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of equal shape, each a view of a larger one, of any order of dimensions."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))

    def view(dtype: torch.dtype) -> torch.Tensor:
        extra = [draw(st.integers(0, 2)) for _ in shape]
        first = [draw(st.integers(0, more)) for more in extra]
        large = torch.zeros([n + more for n, more in zip(shape, extra, strict=True)], dtype=dtype)
        return large[tuple(slice(a, a + n) for a, n in zip(first, shape, strict=True))]

    destination, source = view(to), view(from_)
    source.copy_(torch.randint(-100, 100, source.shape))
    return destination.permute(order), source.permute(order)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.uint8]), st.integers(1, 9))
def test_tiles_copy_every_element(data: st.DataObject, dtype: torch.dtype, tile_words: int) -> None:
    copies = data.draw(st.lists(pairs(dtype, dtype), min_size=1, max_size=4))
    destinations, sources = zip(*copies, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_copy, "TILE_WORDS", tile_words)
        for word, table in tiles(
            lay_out(destinations, sources), dtype.itemsize, dtype.itemsize, converts=False
        ).items():
            assert (table.num_rows_M * table.num_columns_M <= tile_words).all()
            run_kernel(table, word, word, convert=False)
    for destination, source in copies:
        assert torch.equal(destination, source)


@settings(max_examples=50, deadline=None)
@given(st.lists(pairs(torch.float64, torch.float32), min_size=1, max_size=3))
def test_tiles_of_two_types_convert_every_element(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    destinations, sources = zip(*copies, strict=True)
    ((word, table),) = tiles(lay_out(destinations, sources), 8, 4, converts=True).items()
    assert word == 0, "elements that are converted are not joined to words"
    run_kernel(table, 8, 4, convert=True)
    for destination, source in copies:
        assert torch.equal(destination, source.double())


def test_a_contiguous_copy_is_wide_words_in_few_tiles() -> None:
    source, destination = torch.zeros(64, 1024, dtype=torch.bfloat16), torch.zeros(64, 1024, dtype=torch.bfloat16)
    ((word, table),) = tiles(lay_out([destination], [source]), 2, 2, converts=False).items()
    assert word == 8
    assert (table.num_rows_M == 1).all(), "the dimensions were merged"
    assert len(table) == source.nbytes // 8 // gpu_copy.TILE_WORDS
    assert (table.num_columns_M == gpu_copy.TILE_WORDS).all()


def test_a_block_of_columns_is_rows_of_wide_words() -> None:
    source, destination = torch.zeros(1000, 64), torch.zeros(1000, 16)
    ((word, table),) = tiles(lay_out([destination], [source[:, 16:32]]), 4, 4, converts=False).items()
    assert word == 8
    assert set(table.num_columns_M.tolist()) == {8}
    assert set(table.source_row_M.tolist()) == {32}
    assert int(table.num_rows_M.sum()) == 1000


def test_types_of_one_size_are_converted_all_the_same() -> None:
    source, destination = torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.float16)
    assert list(tiles(lay_out([destination], [source]), 2, 2, converts=True)) == [0]


def test_odd_addresses_take_narrow_words() -> None:
    memory = torch.zeros(65, dtype=torch.uint8)
    found = tiles(
        lay_out([memory[1:33], torch.zeros(32, dtype=torch.uint8)], [memory[33:], memory[:32]]),
        1,
        1,
        converts=False,
    )
    assert sorted(found) == [1, 8]


def test_pairs_are_parted_by_type_and_empty_ones_left_out() -> None:
    to = [torch.zeros(2), torch.zeros(0), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1)]
    from_ = [torch.zeros(2), torch.zeros(0), torch.zeros(3), torch.zeros(1)]
    assert group_by_types(to, from_) == {
        (torch.float32, torch.float32): [0, 3],
        (torch.bfloat16, torch.float32): [2],
    }
    assert rows_of(tiles(lay_out(to[:1], from_[:1]), 4, 4, converts=False)[8]).dtype == np.int64
