"""Boxes are sets of elements; pieces are strided arrays; layouts survive the wire."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from tandem.common.errors import RefitError
from tandem.refit import layout as layouts
from tandem.refit.checks import check, check_writable
from tandem.refit.layout import (
    Box,
    Layout,
    LayoutBuilder,
    LayoutPiece,
    PrivateMemory,
    SharedMemory,
    Storage,
    Tensor,
    contiguous_strides,
    whole,
)

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
        rest = list(one.subtract(common))
        np.testing.assert_array_equal(marks(common, *rest), marks(one))  # disjoint: no element is counted twice


def test_a_scalar_is_a_box_of_one_element() -> None:
    scalar = whole(())
    assert scalar.num_elements == 1
    assert scalar.intersect(scalar) == scalar
    assert list(scalar.subtract(scalar)) == []
    assert scalar.contains(scalar)
    assert not scalar.contains(Box((0,), (1,)))


def test_a_box_inside_a_piece_lies_where_the_strides_say() -> None:
    memory = np.arange(400, dtype=np.uint8)
    piece = LayoutPiece(Box((2, 3), (5, 6)), "p", 12, (48, 4))
    inner = Box((4, 5), (2, 2))
    of_piece = np.ndarray((5, 6), np.int32, memory, 12, (48, 4))
    of_inner = np.ndarray((2, 2), np.int32, memory, piece.offset_of(inner), (48, 4))
    np.testing.assert_array_equal(of_inner, of_piece[2:4, 2:4])
    assert piece.last == 12 + 4 * 48 + 5 * 4


def mixed() -> Layout:
    """Tensors of no, one and two dimensions, added one at a time and as a family."""
    builder = LayoutBuilder("here", "GPU-0")
    matrix, scalar = builder.tensor("w", (4, 6), "float32"), builder.tensor("scale", (), "float32")
    vector = builder.tensor("norm", (6,), "bfloat16", block=(2,), scales="norm_scale")
    storage = builder.storage("p", 96, SharedMemory(pid=1, fd=3, inode=5))
    other = builder.storage("q", 100)
    builder.add(scalar, whole(()), other, 96, ())
    builder.add(matrix, Box((4, 0), (0, 6)), storage, 0, (24, 4))  # empty
    builder.add(vector, whole((6,)), other, 0, (2,))
    builder.add_many(matrix, [(0, 0), (2, 0), (4, 0)], [(2, 6), (2, 6), (0, 6)], storage, [0, 48, 96], (24, 4))
    return builder.build()


def test_pieces_are_as_they_were_added_and_empty_ones_are_left_out() -> None:
    layout = mixed()
    check(layout, "trainer-0")
    assert layout.pieces_of("w") == tuple(LayoutPiece(Box((row, 0), (2, 6)), "p", row * 24, (24, 4)) for row in (0, 2))
    assert layout.pieces_of("scale") == (LayoutPiece(whole(()), "q", 96, ()),)
    assert layout.pieces_of("norm") == (LayoutPiece(whole((6,)), "q", 0, (2,)),)
    assert layout.storages == (Storage("p", 96, SharedMemory(pid=1, fd=3, inode=5)), Storage("q", 100, PrivateMemory()))
    with pytest.raises(KeyError):
        layout.pieces_of("nothing")


def test_a_shared_tuple_of_tensors_is_kept_as_it_is() -> None:
    tensors = (Tensor("a", (2,), "float32"), Tensor("b", (2,), "float32"))
    builder = LayoutBuilder("here")
    assert builder.add_tensors(tensors) == 0
    assert builder.build().tensors is tensors
    assert builder.tensor("c", (1,), "int8") == 2
    assert builder.add_tensors((Tensor("d", (), "int8"),)) == 3
    assert [tensor.name for tensor in builder.build().tensors] == ["a", "b", "c", "d"]
    assert len(tensors) == 2


def test_a_box_of_other_dimensions_than_its_tensor_is_refused() -> None:
    builder = LayoutBuilder("here")
    builder.add(builder.tensor("w", (4, 6), "float32"), Box((0,), (4,)), builder.storage("p", 96), 0, (4,))
    with pytest.raises(RefitError, match=r"w\[0:4\] has the wrong number of dimensions"):
        builder.build()


def test_layouts_survive_the_wire() -> None:
    layout = mixed()
    assert layouts.decode(layouts.encode(layout)) == layout
    for empty in (LayoutBuilder("here").build(), Layout("here", "cpu", layout.tensors, (), layout.pieces.rows([]))):
        assert layouts.decode(layouts.encode(empty)) == empty
        check(empty, "trainer-0")
        check_writable(empty, "trainer-0")


def test_what_ranks_have_in_common_is_decoded_once() -> None:
    layout = mixed()
    one, other = (
        layouts.decode(layouts.encode(msgspec.structs.replace(layout, host=host))) for host in ("here", "there")
    )
    assert one.host != other.host
    assert one.tensors is other.tensors
    assert one.pieces is other.pieces


def test_the_fingerprint_is_of_what_a_plan_depends_on() -> None:
    layout = mixed()
    moved = tuple(msgspec.structs.replace(s, address=SharedMemory(pid=9, fd=9, inode=9)) for s in layout.storages[:1])
    assert msgspec.structs.replace(layout, storages=(*moved, layout.storages[1])).fingerprint == layout.fingerprint
    private = tuple(Storage(s.name, s.num_bytes, PrivateMemory()) for s in layout.storages)
    shifted = msgspec.structs.replace(layout.pieces, offset_P=layout.pieces.offset_P + 4)
    for other in (
        msgspec.structs.replace(layout, host="there"),
        msgspec.structs.replace(layout, device="cpu"),
        msgspec.structs.replace(layout, storages=private),
        msgspec.structs.replace(layout, pieces=shifted),
        msgspec.structs.replace(layout, tensors=layout.tensors[::-1]),
    ):
        assert other.fingerprint != layout.fingerprint


@given(garbage=st.binary(max_size=64))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(RefitError, match="not a layout"):
        layouts.decode(garbage)


def test_a_damaged_layout_is_refused() -> None:
    encoded = layouts.encode(mixed())
    for damaged in (encoded[:-1], encoded.replace(b"\x02", b"\x03"), encoded + b"\x00"):
        with pytest.raises(RefitError):
            check(layouts.decode(damaged), "trainer-0")


def test_strides_of_a_row_major_array() -> None:
    assert contiguous_strides((2, 3, 4), 2) == np.zeros((2, 3, 4), np.int16).strides
    assert contiguous_strides((), 4) == ()


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, tandem.refit.planner, tandem.refit.program, tandem.refit.layout, tandem.refit.checks\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
