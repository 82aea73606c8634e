"""Columns are narrow on the wire and 64 bits wide in memory."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tandem.common.errors import RefitError
from tandem.refit import columns
from tandem.refit.columns import ColumnTable, Ints, pad_dims


class Example(ColumnTable, frozen=True, eq=False):
    """A table of two columns."""

    a_N: Ints
    b_ND: Ints


@given(rows=st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), max_size=5), shift=st.integers(0, 62))
def test_tables_survive_the_wire(rows: list[tuple[int, int, int]], shift: int) -> None:
    values = np.array(rows, np.int64).reshape(-1, 3) >> shift
    table = Example(values[:, 0], values[:, 1:])
    read = columns.decode(columns.encode(table), Example, "an example")
    assert read == table
    assert read.a_N.dtype == np.int64
    assert len(read) == len(rows)


def test_small_numbers_take_little_room() -> None:
    narrow, wide = (len(columns.encode(Example(np.full(1000, n), np.zeros((1000, 1), np.int64)))) for n in (100, 2**40))
    assert narrow < 2100
    assert wide > 9000


def test_tables_are_compared_by_value() -> None:
    table = Example(np.arange(3), np.zeros((3, 2), np.int64))
    assert table == Example(np.arange(3), np.zeros((3, 2), np.int64))
    assert table != Example(np.arange(3), np.ones((3, 2), np.int64))
    assert table != 3
    assert table.rows(np.array([2, 0])).a_N.tolist() == [2, 0]
    with pytest.raises(TypeError, match="unhashable"):
        hash(table)


def test_missing_dimensions_stand_in_front() -> None:
    assert pad_dims(np.array([[5, 6]]), 4, 1).tolist() == [[1, 1, 5, 6]]


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x92\x01",
        columns.encode(Example(np.arange(300), np.zeros((300, 1), np.int64)))[:-1],
        columns.encode(Example(np.arange(3), np.zeros((3, 2), np.int64))).replace(b"\x02", b"\x03"),
    ],
)
def test_damaged_tables_are_refused(damaged: bytes) -> None:
    with pytest.raises(RefitError, match="not an example"):
        columns.decode(damaged, Example, "an example")
