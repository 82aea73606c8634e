"""The pieces of the planner that have a law of their own."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.refit.columns import Ints
from tandem.refit.layout import DTYPES
from tandem.refit.planning import assemble, sweep
from tandem.refit.planning.choose import fill
from tandem.refit.transfer import CopyColumns

FLOAT32 = DTYPES.index("float32")


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=6), amount=st.integers(0, 200))
def test_shares_fill_up_the_lowest_loads(loads: list[int], amount: int) -> None:
    shares = fill(np.array(loads), amount)
    assert shares.sum() == amount
    assert (shares >= 0).all()
    ends = shares + loads
    if amount:
        level = ends[shares > 0].max()
        assert (ends >= level - 1).all(), "whoever is lower would have got more"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_merged_copies_move_the_same_bytes(data: st.DataObject) -> None:
    """Random copies of a few shapes on a lattice, so that neighbours and series are common."""
    num = data.draw(st.integers(1, 12))
    shape = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    pitch = data.draw(st.sampled_from([16, 24, 32, 64]))
    cells = data.draw(st.lists(st.integers(0, 19), min_size=num, max_size=num, unique=True))
    places = data.draw(st.permutations(range(20)))[:num] if data.draw(st.booleans()) else cells
    links = [data.draw(st.integers(0, 1)) for _ in cells]
    strides = [shape[1] * 4, 4]
    copies = CopyColumns(
        tensor_C=np.arange(num),
        source_C=np.zeros(num, np.int64),
        destination_C=np.zeros(num, np.int64),
        source_offset_C=np.array(places) * pitch,
        destination_offset_C=np.array(cells) * pitch,
        shape_CD=np.tile(shape, (num, 1)),
        source_strides_CD=np.tile(strides, (num, 1)),
        destination_strides_CD=np.tile(strides, (num, 1)),
        source_dtype_C=np.full(num, FLOAT32),
        destination_dtype_C=np.full(num, FLOAT32),
    )
    merged, link_C = assemble.merge(copies, np.array(links))
    assert len(merged) <= num
    assert moves(merged, link_C) == moves(copies, np.array(links))


def moves(copies: CopyColumns, link_C: Ints) -> list[tuple[int, int, int]]:
    """Every element that moves: link, from which byte, to which."""
    found = []
    for row in range(len(copies)):
        for index in itertools.product(*map(range, copies.shape_CD[row].tolist())):
            source = copies.source_offset_C[row] + np.dot(index, copies.source_strides_CD[row])
            target = copies.destination_offset_C[row] + np.dot(index, copies.destination_strides_CD[row])
            found.append((int(link_C[row]), int(source), int(target)))
    return sorted(found)


def test_a_lattice_of_blocks_is_one_copy() -> None:
    """Two rows of three blocks of 2 × 2, as a column shard of two experts lies."""
    starts = np.array([expert * 1000 + row * 100 for expert in range(2) for row in range(3)])
    columns = {name: np.zeros(6, np.int64) for name in CopyColumns.__struct_fields__ if name.endswith("_C")}
    columns |= {"source_offset_C": starts * 4, "destination_offset_C": np.arange(6) * 16, "tensor_C": np.arange(6)}
    columns |= {"source_dtype_C": np.full(6, FLOAT32), "destination_dtype_C": np.full(6, FLOAT32)}
    shapes = {
        "shape_CD": np.full((6, 2), 2),
        "source_strides_CD": np.tile([40, 4], (6, 1)),
        "destination_strides_CD": np.tile([8, 4], (6, 1)),
    }
    merged, _ = assemble.merge(CopyColumns(**columns, **shapes), np.zeros(6, np.int64))
    assert merged.shape_CD.tolist() == [[2, 3, 2, 2]]


@given(
    boxes=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5), st.integers(1, 3), st.integers(1, 3)),
        max_size=8,
    ),
    wanted=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)),
        max_size=5,
    ),
)
def test_a_sweep_finds_what_comparing_all_pairs_finds(
    boxes: list[tuple[int, ...]], wanted: list[tuple[int, ...]]
) -> None:
    table, asked = (np.array(rows, np.int64).reshape(-1, 5) for rows in (boxes, wanted))
    index = sweep.BoxIndex(table[:, 0], table[:, 1:3], table[:, 3:])
    found = sorted(
        (int(w), int(b), *map(int, start), *map(int, shape))
        for met in index.meet(asked[:, 0], asked[:, 1:3], asked[:, 3:])
        for w, b, start, shape in zip(met.want_N, met.box_N, met.start_ND, met.shape_ND, strict=True)
    )
    expected = []
    for w, one in enumerate(wanted):
        for b, other in enumerate(boxes):
            start = [max(one[d], other[d]) for d in (1, 2)]
            stop = [min(one[d] + one[d + 2], other[d] + other[d + 2]) for d in (1, 2)]
            if one[0] == other[0] and all(a < z for a, z in zip(start, stop, strict=True)):
                expected.append((w, b, *start, *(z - a for a, z in zip(start, stop, strict=True))))
    assert found == sorted(expected)
    overlaps = any(
        a[0] == b[0] and all(a[d] < b[d] + b[d + 2] and b[d] < a[d] + a[d + 2] for d in (1, 2))
        for a, b in itertools.combinations(boxes, 2)
    )
    assert (index.overlap() is not None) == overlaps


@given(rows=st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), max_size=20))
def test_equal_rows_are_one_group(rows: list[tuple[int, int]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 2)
    first_G, group_N = sweep.group_rows(table[:, 0], table)
    assert len(first_G) == len(set(rows))
    for row, group in zip(rows, group_N.tolist(), strict=True):
        assert rows[first_G[group]] == row
