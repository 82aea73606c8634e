"""Strided regions merged into as few copies as possible.

Two regions are joined if one continues where the other ends, along the outermost dimension. Any number of equal regions
at equal distances become one region with one more dimension, such as the same matrix of every expert in a layer.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.refit.columns import Ints, pad_dims
from tandem.refit.layout import ITEM_SIZE_OF_CODE
from tandem.refit.transfer import CopyColumns

_LARGEST = np.iinfo(np.int64).max


def merge(copies: CopyColumns, link_C: Ints) -> tuple[CopyColumns, Ints]:
    """Return fewer copies that move the same elements, and the link of each.

    Args:
        copies: dimensions in any order.
        link_C: copies of different links are not joined.

    Returns:
        Copies sorted by link, then by destination.

    """
    order = np.lexsort((copies.destination_offset_C, copies.destination_C, link_C))
    copies, link_C = _simplify(copies.rows(order)), link_C[order]
    copies, link_C = _join_neighbours(copies, link_C)
    num = len(link_C) + 1
    while len(link_C) < num:  # repeat for series of series, such as gate and up of every expert
        num = len(link_C)
        copies, link_C = _join_series(copies, link_C)
    return copies, link_C


def _simplify(copies: CopyColumns) -> CopyColumns:
    """Return the same copies with fused dimensions, from outermost to innermost at the destination."""
    is_one_CD = copies.shape_CD == 1  # such a dimension is outermost
    order_CD = np.argsort(-np.where(is_one_CD, _LARGEST, copies.destination_strides_CD), axis=1, kind="stable")
    columns = (
        np.take_along_axis(column_CD, order_CD, axis=1)
        for column_CD in (
            copies.shape_CD,
            np.where(is_one_CD, 0, copies.source_strides_CD),
            np.where(is_one_CD, 0, copies.destination_strides_CD),
        )
    )
    return _replace_dims(copies, *_fuse(*columns))


def _fuse(shape_CD: Ints, source_CD: Ints, destination_CD: Ints) -> tuple[Ints, Ints, Ints]:
    """Fuse neighbouring dimensions where both sides step evenly over both; right-align the rest."""
    num, num_dims = shape_CD.shape
    fused = np.ones_like(shape_CD), np.zeros_like(shape_CD), np.zeros_like(shape_CD)
    rows, place_C = np.arange(num), np.full(num, num_dims - 1)
    now = [shape_CD[:, -1].copy(), source_CD[:, -1].copy(), destination_CD[:, -1].copy()]
    for dim in reversed(range(num_dims - 1)):
        outer = shape_CD[:, dim], source_CD[:, dim], destination_CD[:, dim]
        is_long_C = outer[0] > 1
        is_even_C = (outer[1] == now[0] * now[1]) & (outer[2] == now[0] * now[2]) & is_long_C
        is_new_C = is_long_C & ~is_even_C
        is_kept_C = is_new_C & (now[0] > 1)
        for column, value in zip(fused, now, strict=True):
            column[rows[is_kept_C], place_C[is_kept_C]] = value[is_kept_C]
        place_C = place_C - is_kept_C
        now[0] = np.where(is_even_C, now[0] * outer[0], np.where(is_new_C, outer[0], now[0]))
        now[1:] = (np.where(is_new_C, theirs, mine) for theirs, mine in zip(outer[1:], now[1:], strict=True))
    for column, value in zip(fused, now, strict=True):
        column[rows, place_C] = value
    return fused


def _replace_dims(copies: CopyColumns, shape_CD: Ints, source_CD: Ints, destination_CD: Ints) -> CopyColumns:
    """Return copies with other dimensions; a single element gets the strides of a range, so that it can be joined."""
    is_single_C = (shape_CD == 1).all(axis=1)
    source_CD[is_single_C, -1] = ITEM_SIZE_OF_CODE[copies.source_dtype_C[is_single_C]]
    destination_CD[is_single_C, -1] = ITEM_SIZE_OF_CODE[copies.destination_dtype_C[is_single_C]]
    used = np.flatnonzero((shape_CD > 1).any(axis=0))
    first = int(used[0]) if len(used) else shape_CD.shape[1] - 1
    return msgspec.structs.replace(
        copies,
        shape_CD=shape_CD[:, first:],
        source_strides_CD=source_CD[:, first:],
        destination_strides_CD=destination_CD[:, first:],
    )


def _are_alike(copies: CopyColumns, link_C: Ints, shape_CD: Ints) -> NDArray[np.bool_]:
    """Return for each copy but the last whether the next one differs only in its offsets, given `shape_CD`."""
    flat = (
        link_C,
        copies.source_C,
        copies.destination_C,
        copies.source_dtype_C,
        copies.destination_dtype_C,
    )
    wide = (shape_CD, copies.source_strides_CD, copies.destination_strides_CD)
    alike = np.ones(max(len(link_C) - 1, 0), bool)
    for column in flat:
        alike &= column[1:] == column[:-1]
    for column in wide:
        alike &= (column[1:] == column[:-1]).all(axis=1)
    return alike


def _join_neighbours(copies: CopyColumns, link_C: Ints) -> tuple[CopyColumns, Ints]:
    """Join copies that continue, along the outermost dimension, where the one before ends."""
    if len(link_C) < 2:
        return copies, link_C
    rows = np.arange(len(link_C))
    is_long_CD = copies.shape_CD > 1
    outer_C = np.where(is_long_CD.any(axis=1), is_long_CD.argmax(axis=1), is_long_CD.shape[1] - 1)
    inner_CD = copies.shape_CD.copy()
    inner_CD[rows, outer_C] = 0
    goes_on = _are_alike(copies, link_C, inner_CD)
    num_C = copies.shape_CD[rows, outer_C]
    for offset_C, strides_CD in (
        (copies.source_offset_C, copies.source_strides_CD),
        (copies.destination_offset_C, copies.destination_strides_CD),
    ):
        goes_on &= offset_C[1:] == (offset_C + num_C * strides_CD[rows, outer_C])[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    shape_CD = copies.shape_CD[first]
    shape_CD[np.arange(len(first)), outer_C[first]] = np.add.reduceat(num_C, first)
    joined = msgspec.structs.replace(copies.rows(first), shape_CD=shape_CD)
    return _simplify(joined), link_C[first]


def _join_series(copies: CopyColumns, link_C: Ints) -> tuple[CopyColumns, Ints]:
    """Join equal copies at equal distances on both sides."""
    if len(link_C) < 2:
        return copies, link_C
    source_step = np.diff(copies.source_offset_C)
    destination_step = np.diff(copies.destination_offset_C)
    alike = _are_alike(copies, link_C, copies.shape_CD) & (source_step > 0) & (destination_step > 0)
    first, length = _series(alike, source_step, destination_step)
    leaders = copies.rows(first)
    is_long = length > 1
    num_dims = copies.shape_CD.shape[1] + 1
    shape_CD, source_CD, destination_CD = (
        pad_dims(column_CD, num_dims, fill)
        for column_CD, fill in (
            (leaders.shape_CD, 1),
            (leaders.source_strides_CD, 0),
            (leaders.destination_strides_CD, 0),
        )
    )
    shape_CD[:, 0] = length
    source_CD[is_long, 0] = source_step[first[is_long]]
    destination_CD[is_long, 0] = destination_step[first[is_long]]
    series = msgspec.structs.replace(
        leaders, shape_CD=shape_CD, source_strides_CD=source_CD, destination_strides_CD=destination_CD
    )
    return _simplify(series), link_C[first]


def _series(alike: NDArray[np.bool_], *steps: Ints) -> tuple[Ints, Ints]:
    """Cut rows into series of equal steps, from the first row on.

    Step i leads from row i to the next. It is taken if it equals the one before, or if the one before is not taken and
    row i is still free. So the result is known where steps are equal or rows differ, and alternates in between.

    Returns:
        The first row of each series, and its number of rows.

    """
    num = len(alike)
    equal = np.concatenate([[False], alike[1:] & alike[:-1]])
    for step in steps:
        equal[1:] &= step[1:] == step[:-1]
    rows = np.arange(num)
    last_known = np.maximum.accumulate(np.where(equal | ~alike, rows, -1))
    is_taken = np.where(last_known < 0, False, equal[last_known]) ^ ((rows - last_known) % 2 == 1)
    first = np.flatnonzero(np.concatenate([[True], ~is_taken]))
    return first, np.diff(np.concatenate([first, [num + 1]]))
