"""Messages of a stream, cut from its copies; both ends derive the same messages from the copies alone.

Small copies are packed together. Large ones are cut, and are not packed at an end where they are contiguous.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tandem.refit.columns import Ints
from tandem.refit.transfer import CopyColumns
from tandem.refit.transports.memory import item_sizes, wire_bytes

ALONE_BYTES = 1 << 20
"""A contiguous copy of at least this size is a message of its own."""


class MessageBuckets(NamedTuple):
    """Messages in the order of sending."""

    copies: CopyColumns
    """K rows: those of the transfer, with large ones cut."""
    wire_dtype_K: Ints
    """Element type on the wire: the smaller of the two ends' types; the source's if they are equally large."""
    place_K: Ints
    """Byte offset of each row in its message, aligned for its type; its elements are row-major."""
    first_B1: list[int]
    """Message b contains rows ``first_B1[b] : first_B1[b + 1]``."""
    num_bytes_B: list[int]


def divide(copies: CopyColumns, limit: int) -> MessageBuckets:
    """Return messages of at most `limit` bytes for these copies."""
    size_C = np.minimum(item_sizes(copies.source_dtype_C), item_sizes(copies.destination_dtype_C))
    # Order by element size, largest first, so that rows are aligned in their message without gaps.
    cut = _cut_large(copies.rows(np.argsort(-size_C, kind="stable")), limit)
    source_size_K, destination_size_K = item_sizes(cut.source_dtype_C), item_sizes(cut.destination_dtype_C)
    wire_dtype_K = np.where(destination_size_K < source_size_K, cut.destination_dtype_C, cut.source_dtype_C)
    num_bytes_K = wire_bytes(cut)
    is_direct_K = _is_contiguous(cut.shape_CD, cut.source_strides_CD, source_size_K) & (
        wire_dtype_K == cut.source_dtype_C
    ) | _is_contiguous(cut.shape_CD, cut.destination_strides_CD, destination_size_K) & (
        wire_dtype_K == cut.destination_dtype_C
    )
    is_alone_K = is_direct_K & (num_bytes_K >= min(ALONE_BYTES, limit))
    place_K, first_B1, num_bytes_B = _fill(num_bytes_K.tolist(), is_alone_K.tolist(), limit)
    return MessageBuckets(cut, wire_dtype_K, np.array(place_K, np.int64), first_B1, num_bytes_B)


def _fill(num_bytes_K: list[int], is_alone_K: list[bool], limit: int) -> tuple[list[int], list[int], list[int]]:
    """Return each row's place in its message, each message's first row followed by an end, and the messages' sizes."""
    places: list[int] = []
    first: list[int] = []
    filled: list[int] = []
    is_open = False
    for row, (num_bytes, is_alone) in enumerate(zip(num_bytes_K, is_alone_K, strict=True)):
        if not is_open or is_alone or filled[-1] + num_bytes > limit:
            first.append(row)
            filled.append(0)
        places.append(filled[-1])
        filled[-1] += num_bytes
        is_open = not is_alone
    return places, [*first, len(num_bytes_K)], filled


def _is_contiguous(shape_CD: Ints, strides_CD: Ints, size_C: Ints) -> Ints:
    """Return which rows are row-major without gaps."""
    num_dims = shape_CD.shape[1]
    contiguous_C = np.ones(len(shape_CD), bool)
    step_C = size_C.copy()
    for dim in reversed(range(num_dims)):
        contiguous_C &= (shape_CD[:, dim] == 1) | (strides_CD[:, dim] == step_C)
        step_C = step_C * shape_CD[:, dim]
    return contiguous_C


def _cut_large(copies: CopyColumns, limit: int) -> CopyColumns:
    """Return the copies, with those above `limit` cut into slices of even size."""
    num_bytes_C = wire_bytes(copies)
    large = np.flatnonzero(num_bytes_C > limit)
    if not len(large):
        return copies
    row_K: list[Ints] = []
    start_K: list[Ints] = []
    shape_K: list[Ints] = []
    num_dims, next_row = copies.shape_CD.shape[1], 0
    for row in large.tolist():
        shape = copies.shape_CD[row].tolist()
        boxes = list(_boxes(shape, int(num_bytes_C[row]) // math.prod(shape), limit))
        row_K += [np.arange(next_row, row), np.full(len(boxes), row)]
        start_K += [np.zeros((row - next_row, num_dims), np.int64), np.array([start for start, _ in boxes])]
        shape_K += [copies.shape_CD[next_row:row], np.array([shape for _, shape in boxes])]
        next_row = row + 1
    row_K.append(np.arange(next_row, len(copies)))
    start_K.append(np.zeros((len(copies) - next_row, num_dims), np.int64))
    shape_K.append(copies.shape_CD[next_row:])
    cut, start_KD = copies.rows(np.concatenate(row_K)), np.concatenate(start_K)
    return CopyColumns(
        cut.tensor_C,
        cut.source_C,
        cut.destination_C,
        cut.source_offset_C + (start_KD * cut.source_strides_CD).sum(axis=1),
        cut.destination_offset_C + (start_KD * cut.destination_strides_CD).sum(axis=1),
        np.concatenate(shape_K),
        cut.source_strides_CD,
        cut.destination_strides_CD,
        cut.source_dtype_C,
        cut.destination_dtype_C,
    )


def _boxes(shape: Sequence[int], item_size: int, limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield start and shape of slices of at most `limit` bytes, in row-major order."""
    inner, dim = item_size, len(shape) - 1
    while inner * shape[dim] <= limit:  # ends before dimension 0, because the whole is larger than the limit
        inner *= shape[dim]
        dim -= 1
    num_pieces = -(-shape[dim] // (limit // inner))
    step = -(-shape[dim] // num_pieces)
    for *start, first in itertools.product(*(range(n) for n in shape[:dim]), range(0, shape[dim], step)):
        yield (
            (*start, first, *(0 for _ in shape[dim + 1 :])),
            (*(1 for _ in start), min(step, shape[dim] - first), *shape[dim + 1 :]),
        )
