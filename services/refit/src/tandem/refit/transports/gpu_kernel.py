"""The Triton kernel of `tandem.refit.transports.gpu_copy`, imported only where there is a GPU."""

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
    """Copy tile number ``program_id``; a row of the table has the fields of `segments.CopyTiles` in order."""
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
