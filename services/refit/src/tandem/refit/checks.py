"""Exact checks of layouts: pieces lie within bounds and do not overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RefitError
from tandem.refit.columns import Ints, pad_dims
from tandem.refit.layout import ITEM_SIZES, Layout, PieceColumns
from tandem.refit.planning import sweep
from tandem.refit.planning.names import TensorTable, tensor_table


def check(layout: Layout, who: str) -> None:
    """Raise `RefitError` if a piece lies outside its tensor or storage, or overlaps another of its tensor."""
    _check_columns(layout, who)
    table = tensor_table(layout.tensors)
    used_T = np.unique(layout.pieces.tensor_P)
    for index in used_T[table.dtype_T[used_T] < 0]:
        tensor = layout.tensors[index]
        raise RefitError(f"{who}: {tensor.name} has element type {tensor.dtype!r}; known are {', '.join(ITEM_SIZES)}")
    _check_places(layout, table, who)
    pieces, num_dims = layout.pieces, max(1, layout.pieces.start_PD.shape[1])
    crowded = np.flatnonzero(np.bincount(pieces.tensor_P)[pieces.tensor_P] > 1) if len(pieces) else pieces.tensor_P
    boxes = sweep.BoxIndex(
        pieces.tensor_P[crowded],
        pad_dims(pieces.start_PD[crowded], num_dims, 0),
        pad_dims(pieces.shape_PD[crowded], num_dims, 1),
    )
    overlap = boxes.overlap()
    if overlap is not None:
        rows = crowded[list(overlap)].tolist()
        first_box, second_box = (layout.piece(row).box for row in rows)
        raise RefitError(f"{who}: {layout.tensors[pieces.tensor_P[rows[0]]].name}{first_box} overlaps {second_box}")


def check_writable(layout: Layout, who: str) -> None:
    """Raise `RefitError` if two wanted elements share a byte of memory. Call after `check`."""
    places = _places(layout)
    crossed = np.flatnonzero(places.is_crossed_P)
    if len(crossed):
        owner, label = _names(layout, who, int(crossed[0]))
        raise RefitError(f"{owner}: elements of {label} share memory with each other")
    answers: dict[bytes, bool] = {}
    for one_N, other_N in _spans_that_meet(places):
        columns = [places.offset_P[other_N] - places.offset_P[one_N]]
        for rows in (one_N, other_N):
            columns += [places.item_size_P[rows], *places.shape_PD[rows].T, *places.strides_PD[rows].T]
        cases_NK = np.stack(columns, axis=1)
        first_G, _ = sweep.group_rows(cases_NK)  # families of pieces pose the same question many times
        for row in first_G:
            case = cases_NK[row].tobytes()
            if case not in answers:
                answers[case] = _share_a_byte(cases_NK[row].tolist())
            if answers[case]:
                owner, label = _names(layout, who, int(one_N[row]))
                raise RefitError(f"{owner}: {label} and {_names(layout, who, int(other_N[row]))[1]} share memory")


def _names(layout: Layout, who: str, row: int) -> tuple[str, str]:
    """Return how error messages name a piece's storage and the piece."""
    piece = layout.piece(row)
    return f"{who}: storage {piece.parameter!r}", f"{layout.tensors[layout.pieces.tensor_P[row]].name}{piece.box}"


def _check_columns(layout: Layout, who: str) -> None:
    """Raise `RefitError` if the columns of a layout are inconsistent, since it may have come over the wire."""
    pieces = layout.pieces
    num_dims = pieces.start_PD.shape[1] if pieces.start_PD.ndim == 2 else -1
    for field in PieceColumns.__struct_fields__:
        expected = (len(pieces), num_dims) if field.endswith("D") else (len(pieces),)
        if getattr(pieces, field).shape != expected:
            raise RefitError(f"{who}: column {field} of its layout has shape {getattr(pieces, field).shape}")
    for column_P, num, kind in (
        (pieces.tensor_P, len(layout.tensors), "tensor"),
        (pieces.storage_P, len(layout.storages), "storage"),
    ):
        wrong = np.flatnonzero((column_P < 0) | (column_P >= num))
        if len(wrong):
            raise RefitError(f"{who}: a piece is of {kind} {column_P[wrong[0]]} of {num}")


def _check_places(layout: Layout, table: TensorTable, who: str) -> None:
    """Raise `RefitError` for the first piece that lies outside its tensor or its storage."""
    pieces = layout.pieces
    num_dims = max(1, pieces.start_PD.shape[1], table.num_dims)
    start_PD, shape_PD = pad_dims(pieces.start_PD, num_dims, 0), pad_dims(pieces.shape_PD, num_dims, 1)
    strides_PD = pad_dims(pieces.strides_PD, num_dims, 0)
    limit_PD = pad_dims(table.shape_TD, num_dims, 1)[pieces.tensor_P]
    item_P = table.item_size_T[pieces.tensor_P]
    outside_PD = (start_PD < 0) | (shape_PD < 1) | (start_PD + shape_PD > limit_PD)
    odd_P: NDArray[np.bool_] = (pieces.offset_P < 0) | (pieces.offset_P % item_P != 0)
    odd_P |= ((strides_PD < 0) | (strides_PD % item_P[:, None] != 0)).any(axis=1)
    capacity_P = np.array([storage.num_bytes for storage in layout.storages], np.int64)[pieces.storage_P]
    beyond_P: NDArray[np.bool_] = pieces.offset_P + ((shape_PD - 1) * strides_PD).sum(axis=1) + item_P > capacity_P
    reasons: tuple[tuple[Any, Callable[[int], str]], ...] = (
        (
            outside_PD.any(axis=1),
            lambda row: f"lies outside the tensor's shape {layout.tensors[pieces.tensor_P[row]].shape}",
        ),
        (odd_P, lambda row: f"has offset or strides that are not multiples of {item_P[row]} bytes"),
        (
            beyond_P,
            lambda row: (
                f"reaches outside storage {layout.storages[pieces.storage_P[row]].name!r} of {capacity_P[row]} bytes"
            ),
        ),
    )
    for wrong_P, describe in reasons:
        wrong = np.flatnonzero(wrong_P)
        if len(wrong):
            row = int(wrong[0])
            raise RefitError(
                f"{who}: {layout.tensors[pieces.tensor_P[row]].name}{layout.piece(row).box} {describe(row)}"
            )


class _Places(msgspec.Struct, frozen=True, eq=False):
    """The memory of wanted pieces; dimensions from the largest stride to the smallest."""

    storage_P: Ints
    offset_P: Ints
    stop_P: Ints
    """One past the last byte."""
    item_size_P: Ints
    shape_PD: Ints
    strides_PD: Ints
    is_crossed_P: NDArray[np.bool_]
    """Whether the dimensions do not nest, so that elements of the piece may share bytes."""


def _places(layout: Layout) -> _Places:
    pieces = layout.pieces
    num_dims = max(1, pieces.start_PD.shape[1])
    shape_PD, strides_PD = pad_dims(pieces.shape_PD, num_dims, 1), pad_dims(pieces.strides_PD, num_dims, 0)
    item_P = tensor_table(layout.tensors).item_size_T[pieces.tensor_P]
    # A dimension of one element has no stride; outermost, it spans nothing.
    outermost = np.iinfo(np.int64).max
    order_PD = np.argsort(-np.where(shape_PD > 1, strides_PD, outermost), axis=1, kind="stable")
    shape_PD = np.take_along_axis(shape_PD, order_PD, axis=1)
    strides_PD = np.where(shape_PD > 1, np.take_along_axis(strides_PD, order_PD, axis=1), 0)
    extent_P, is_crossed_P = item_P, np.zeros(len(pieces), bool)
    for dim in reversed(range(num_dims)):
        is_long_P = shape_PD[:, dim] > 1
        is_crossed_P |= is_long_P & (strides_PD[:, dim] < extent_P)
        extent_P = np.where(is_long_P, strides_PD[:, dim] * shape_PD[:, dim], extent_P)
    stop_P = pieces.offset_P + ((shape_PD - 1) * strides_PD).sum(axis=1) + item_P
    return _Places(pieces.storage_P, pieces.offset_P, stop_P, item_P, shape_PD, strides_PD, is_crossed_P)


def _spans_that_meet(places: _Places) -> Iterator[tuple[Ints, Ints]]:
    """Yield pairs of places in one storage with overlapping byte ranges, in batches."""
    if not len(places.offset_P):
        return
    radix = int(places.stop_P.max()) + 1
    order = np.argsort(places.storage_P * radix + places.offset_P, kind="stable")
    base_P = places.storage_P[order] * radix
    first_P, stop_P = base_P + places.offset_P[order], base_P + places.stop_P[order]
    next_P = np.arange(1, len(order) + 1)
    count_P = np.maximum(np.searchsorted(first_P, stop_P) - next_P, 0)
    for slab in sweep.slabs(count_P):
        one_N, other_N = sweep.ranges(next_P[slab], count_P[slab])
        if len(one_N):
            yield order[slab][one_N], order[other_N]


def _share_a_byte(case: list[int]) -> bool:
    """Return whether an element of each place shares a byte: an integer equation over index ranges, solved exactly."""
    delta, *numbers = case
    num_dims = (len(numbers) // 2 - 1) // 2
    halves = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    spans: dict[int, tuple[int, int]] = {1: (1 - halves[1][0], halves[0][0] - 1)}
    for sign, (_, *dims) in zip((1, -1), halves, strict=True):
        for n, stride in zip(dims[:num_dims], dims[num_dims:], strict=True):
            low, high = spans.get(stride, (0, 0))
            ends = sorted((0, sign * (n - 1)))
            spans[stride] = (low + ends[0], high + ends[1])
    return _is_solvable(delta, sorted(((stride, low, high) for stride, (low, high) in spans.items()), reverse=True))


def _is_solvable(total: int, terms: list[tuple[int, int, int]]) -> bool:
    """Return whether ``sum(stride_k * c_k) == total`` for integers ``low_k <= c_k <= high_k``; strides descend."""
    if not terms:
        return total == 0
    (stride, low, high), other_terms = terms[0], terms[1:]
    if stride == 0:
        return _is_solvable(total, other_terms)
    rest_low = sum(s * a for s, a, _ in other_terms)
    rest_high = sum(s * b for s, _, b in other_terms)
    first = max(low, -((rest_high - total) // stride))  # rounds up
    last = min(high, (total - rest_low) // stride)
    return any(_is_solvable(total - stride * c, other_terms) for c in range(first, last + 1))
