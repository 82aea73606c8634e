"""Boxes are sets of elements; pieces are strided arrays."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from tandem.refit.layout import Box, Layout, Piece, PrivateMemory, Storage, TensorLayout, whole

SHAPE = (5, 6)
boxes = st.tuples(st.integers(0, 4), st.integers(0, 5)).flatmap(
    lambda start: st.tuples(*(st.integers(1, n - a) for n, a in zip(SHAPE, start, strict=True))).map(
        lambda shape: Box(start, shape)
    )
)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def marks(*among: Box) -> Any:
    """How often each element of a 5×6 tensor is covered."""
    counts_RC = np.zeros(SHAPE, np.int32)
    for box in among:
        counts_RC[slices(box)] += 1
    return counts_RC


@given(one=boxes, other=boxes)
def test_box_algebra_is_that_of_sets_of_elements(one: Box, other: Box) -> None:
    both_RC = marks(one, other) == 2
    common = one.intersect(other)
    np.testing.assert_array_equal(both_RC, marks(*([common] if common else [])) == 1)
    assert one.contains(other) == bool((marks(one)[slices(other)] == 1).all())
    assert one.num_elements == marks(one).sum()
    if common is not None:
        rest = list(one.without(common))
        np.testing.assert_array_equal(marks(common, *rest), marks(one))  # disjoint: no element is counted twice


def test_a_scalar_is_a_box_of_one_element() -> None:
    scalar = whole(())
    assert scalar.num_elements == 1
    assert scalar.intersect(scalar) == scalar
    assert list(scalar.without(scalar)) == []
    assert scalar.contains(scalar)
    assert not scalar.contains(Box((0,), (1,)))


def test_a_box_inside_a_piece_lies_where_the_strides_say() -> None:
    memory = np.arange(400, dtype=np.uint8)
    piece = Piece(Box((2, 3), (5, 6)), "p", 12, (48, 4))
    inner = Box((4, 5), (2, 2))
    of_piece = np.ndarray((5, 6), np.int32, memory, 12, (48, 4))
    of_inner = np.ndarray((2, 2), np.int32, memory, piece.offset_of(inner), (48, 4))
    np.testing.assert_array_equal(of_inner, of_piece[2:4, 2:4])
    assert piece.last == 12 + 4 * 48 + 5 * 4


def test_a_process_may_hold_nothing_of_a_tensor_and_read_two_from_one_place() -> None:
    empty = Piece(Box((4, 0), (0, 6)), "p", 48, (24, 4))
    halves = [Piece(Box((row, 0), (2, 6)), "p", 0, (24, 4)) for row in (0, 2)]
    tensors = {"w": TensorLayout((4, 6), "float32", (empty, *halves))}
    Layout("here", tensors, {"p": Storage(48, PrivateMemory())}).check("trainer-0")
