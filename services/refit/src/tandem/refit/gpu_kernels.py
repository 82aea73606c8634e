"""The Triton kernels of copies and digests, imported only where there is a GPU.

`tandem.refit.transports.gpu_copy` launches the one, `tandem.refit.digests.kernels` the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def types(word: int, to: torch.dtype, from_: torch.dtype) -> tuple[Any, Any]:
    """Return the types that the kernel writes and reads: plain words, or elements to convert if `word` is 0."""
    return (_WORDS[word], _WORDS[word]) if word else (_TYPES[to], _TYPES[from_])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def copy_tiles(table_M8, TO: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Copy tile number ``program_id``; a row of the table has the fields of `gpu_copy.CopyTiles` in order."""
    row = table_M8 + tl.program_id(0).to(tl.int64) * 8
    destination = tl.load(row).to(tl.pointer_type(TO))
    source = tl.load(row + 1).to(tl.pointer_type(FROM))
    num_rows = tl.load(row + 2)
    num_columns = tl.load(row + 3)
    to_row, from_row = tl.load(row + 4), tl.load(row + 5)
    to_column, from_column = tl.load(row + 6), tl.load(row + 7)
    num = (num_rows * num_columns).to(tl.int32)  # a tile is small, so 32-bit divisions suffice
    columns = num_columns.to(tl.int32)
    for start in range(0, num, BLOCK):
        index = start + tl.arange(0, BLOCK)
        at_row, at_column = (index // columns).to(tl.int64), (index % columns).to(tl.int64)
        is_inside = index < num
        words = tl.load(source + at_row * from_row + at_column * from_column, mask=is_inside)
        tl.store(destination + at_row * to_row + at_column * to_column, words.to(TO), mask=is_inside)


_ROWS, _COLUMNS = 16, 256
"""Elements that a program holds at once: each multiplier of a column is read once for so many rows."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_products(  # type: ignore[no-untyped-def,unused-ignore]
    total_1,
    words_RC,
    row_stride,
    num_rows,
    num_columns,
    rows_R,
    rows_stride,
    columns_C,
    columns_stride,
    LOWER_SIGNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the products of a few rows to the total; integers wrap at 64 bits, so the order does not matter."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    row_words = words_RC + row.to(tl.int64) * row_stride
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    for start in range(0, num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < num_columns
        words = tl.load(row_words[:, None] + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0)
        elements = (words.to(tl.int64) ^ LOWER_SIGNS) - LOWER_SIGNS
        multipliers = tl.load(columns_C + column.to(tl.int64) * columns_stride, mask=is_column, other=0)
        sums += elements * multipliers[None, :]
    of_rows = tl.load(rows_R + row.to(tl.int64) * rows_stride, mask=is_row, other=0)
    tl.atomic_add(total_1, tl.sum(tl.sum(sums, axis=1) * of_rows, axis=0))


def add_products(
    total: torch.Tensor, words_RC: torch.Tensor, rows_R: torch.Tensor, columns_C: torch.Tensor, lower_signs: int
) -> None:
    """Queue ``total += sum_rc e(r, c) * rows(r) * columns(c)``, modulo 2**64, on the current stream.

    Args:
        total: a scalar of type int64.
        words_RC: elements as signed integers, unit stride within a row.
        rows_R: a multiplier for each row, int64.
        columns_C: a multiplier for each column, int64.
        lower_signs: the top bit of each byte of an element but the last.
    """
    num_rows, num_columns = words_RC.shape
    sizes: tuple[Any, ...] = (words_RC.stride(0), num_rows, num_columns)
    with torch.cuda.device(words_RC.device):
        _add_products[(triton.cdiv(num_rows, _ROWS),)](
            total, words_RC, *sizes, rows_R, rows_R.stride(0), columns_C, columns_C.stride(0),
            LOWER_SIGNS=lower_signs, ROWS=_ROWS, COLUMNS=_COLUMNS,
        )  # fmt: skip
