"""Layouts that contradict themselves are refused, and only those."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import RefitError
from tandem.refit.checks import check, check_writable
from tandem.refit.layout import Box, Layout, LayoutBuilder, LayoutPiece, whole
from tandem.refit.planner import plan


def one_storage(
    num_bytes: int, *pieces: LayoutPiece, shape: tuple[int, ...] = (4, 4), dtype: str = "float32"
) -> Layout:
    """One tensor in one storage."""
    builder = LayoutBuilder("host")
    tensor, storage = builder.tensor("q", shape, dtype), builder.storage("s", num_bytes)
    for piece in pieces:
        builder.add(tensor, piece.box, storage, piece.offset, piece.strides)
    return builder.build()


def piece(
    start: tuple[int, ...], shape: tuple[int, ...], offset: int = 0, strides: tuple[int, ...] = (16, 4)
) -> LayoutPiece:
    return LayoutPiece(Box(start, shape), "s", offset, strides)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (one_storage(64, piece((0, 0), (2, 4)), piece((1, 0), (2, 4), 32)), r"q\[0:2, 0:4\] overlaps \[1:3, 0:4\]"),
        (one_storage(64, piece((0, 0), (4, 4)), piece((0, 0), (4, 4))), r"q\[0:4, 0:4\] overlaps \[0:4, 0:4\]"),
        (one_storage(99, piece((2, 0), (3, 4))), r"q\[2:5, 0:4\] lies outside the tensor's shape \(4, 4\)"),
        (one_storage(99, piece((-1, 0), (2, 4))), r"lies outside the tensor's shape"),
        (one_storage(63, piece((0, 0), (4, 4))), r"reaches outside storage 's' of 63 bytes"),
        (one_storage(64, piece((0, 0), (4, 4), 4)), r"reaches outside storage 's' of 64 bytes"),
        (one_storage(64, piece((0, 0), (2, 4), 2)), r"not multiples of 4 bytes"),
        (one_storage(64, piece((0, 0), (2, 4), -4)), r"not multiples of 4 bytes"),
        (one_storage(64, piece((0, 0), (2, 4), 0, (-16, 4))), r"not multiples of 4 bytes"),
        (one_storage(64, piece((0, 0), (4, 4)), dtype="float3"), r" has element type 'float3'; known are float64"),
    ],
    ids=["overlap", "twice", "past the end", "negative", "storage", "offset", "odd", "below 0", "backwards", "dtype"],
)
def test_check_refuses_a_layout_that_contradicts_itself(wrong: Layout, message: str) -> None:
    with pytest.raises(RefitError, match=message) as caught:
        check(wrong, "trainer-0")
    assert str(caught.value).startswith("trainer-0: q")


def test_columns_that_do_not_fit_together_are_refused() -> None:
    """Such a layout can only come over the wire."""
    layout = one_storage(64, piece((0, 0), (4, 4)))
    ones = np.ones(1, np.int64)
    for field, column, message in (
        ("tensor_P", ones, "a piece is of tensor 1 of 1"),
        ("storage_P", -ones, "a piece is of storage -1 of 1"),
        ("offset_P", np.zeros(2, np.int64), "column offset_P"),
        ("shape_PD", np.ones((1, 3), np.int64), "column shape_PD"),
        ("start_PD", ones, "column start_PD"),
    ):
        wrong = msgspec.structs.replace(layout, pieces=msgspec.structs.replace(layout.pieces, **{field: column}))
        with pytest.raises(RefitError, match=message):
            check(wrong, "trainer-0")


def test_two_tensors_may_be_read_from_one_place() -> None:
    halves = [piece((row, 0), (2, 4)) for row in (0, 2)]
    check(one_storage(32, *halves), "trainer-0")


@pytest.mark.parametrize(
    "wrong",
    [
        one_storage(64, piece((0, 0), (2, 4)), piece((2, 0), (2, 4), 28)),
        one_storage(64, piece((0, 0), (4, 4), 0, (12, 4))),
        one_storage(64, piece((0, 0), (4, 4), 0, (0, 4))),
        one_storage(64, piece((0, 0), (4, 2)), piece((0, 2), (4, 2), 4)),
    ],
    ids=["ranges", "rows", "broadcast", "interleaved"],
)
def test_two_wanted_elements_may_not_share_memory(wrong: Layout) -> None:
    check(wrong, "rollout-0")
    with pytest.raises(RefitError, match=r"rollout-0: storage 's': .* share memory"):
        plan({}, {"rollout-0": wrong}, allow_alias=False)


def test_interleaved_pieces_that_do_not_touch_may_be_written() -> None:
    layout = one_storage(64, piece((0, 0), (4, 2)), piece((0, 2), (4, 2), 8))
    check(layout, "rollout-0")
    check_writable(layout, "rollout-0")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_shared_memory_is_found_exactly(data: st.DataObject) -> None:
    """Compare with counting how often every byte is written."""
    num_bytes, pieces = 0, []
    for index in range(data.draw(st.integers(2, 3))):
        shape = (1, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
        strides = (0, *(2 * data.draw(st.integers(0, 9)) for _ in range(2)))
        place = LayoutPiece(Box((index, 0, 0), shape), "s", 2 * data.draw(st.integers(0, 20)), strides)
        pieces.append(place)
        num_bytes = max(num_bytes, place.last + 2)
    counts = np.zeros(num_bytes, np.int64)
    for place in pieces:
        for _, i, j in itertools.product(*map(range, place.box.shape)):
            offset = place.offset_of(Box((place.box.start[0], i, j), (1, 1, 1)))
            counts[offset : offset + 2] += 1
    tested = one_storage(num_bytes, *pieces, shape=(3, 4, 4), dtype="float16")
    check(tested, "rollout-0")
    if counts.max() > 1 or any(_refused_although_disjoint(place) for place in pieces):
        with pytest.raises(RefitError, match="share memory"):
            check_writable(tested, "rollout-0")
    else:
        check_writable(tested, "rollout-0")


def _refused_although_disjoint(place: LayoutPiece) -> bool:
    """Say whether no order of its dimensions nests: such a piece is refused, whether or not two elements collide."""
    dims = sorted((s, n) for n, s in zip(place.box.shape, place.strides, strict=True) if n > 1)
    return any(outer < inner * n for (inner, n), (outer, _) in itertools.pairwise([(2, 1), *dims]))


def test_a_tensor_named_twice_is_refused() -> None:
    builder = LayoutBuilder("host")
    for _ in range(2):
        builder.add(builder.tensor("q", (4,), "float32"), whole((4,)), builder.storage("s", 16), 0, (4,))
    with pytest.raises(RefitError, match="t describes q twice"):
        plan({"t": builder.build()}, {}, allow_alias=False)
