"""Copies within one GPU's address space in a few launches, by a Triton kernel and tiles of even size.

Memory of a peer GPU or of another process, opened through CUDA IPC, is in the same address space.

A kernel is fast if it has many programs with about equal work, and if neighbours in a warp access neighbours in memory.
So dimensions that are adjacent in memory on both sides become one, and elements become words of up to eight bytes. The
rest is cut into tiles: rows × columns of words, with one stride each.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from tandem.refit.columns import ColumnTable, Ints, pad_dims

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
"""Types between which the kernel rounds like torch."""

_BLOCK = 1024
TILE_WORDS = 8192
"""Most words that a kernel program copies: 64 KiB of the widest words."""

WORD_SIZES = (8, 4, 2, 1)


class StridedCopies(ColumnTable, frozen=True, eq=False):
    """C copies of one element type at each end. Addresses and strides in bytes, from the outermost dimension."""

    destination_C: Ints
    source_C: Ints
    shape_CD: Ints
    destination_strides_CD: Ints
    source_strides_CD: Ints


class CopyTiles(ColumnTable, frozen=True, eq=False):
    """M tiles. Addresses in bytes, everything else in words (elements if types differ)."""

    destination_M: Ints
    source_M: Ints
    num_rows_M: Ints
    num_columns_M: Ints
    destination_row_M: Ints
    source_row_M: Ints
    destination_column_M: Ints
    source_column_M: Ints


def tiles(copies: StridedCopies, destination_size: int, source_size: int, *, converts: bool) -> dict[int, CopyTiles]:
    """Return the tiles to copy, by bytes per word. Converted elements cannot be joined to words: their key is 0.

    Args:
        copies: none of which is empty.
        destination_size: bytes per element.
        source_size: likewise; equal unless elements are converted.
        converts: whether the element types differ.

    """
    flat = _enumerate_outer(_merge_dims(copies))
    if converts:
        return {0: _strides_over(_cut(flat), destination_size, source_size)}
    item_size = source_size
    is_run_M = (flat.destination_column_M == item_size) & (flat.source_column_M == item_size)
    spans = (flat.destination_M, flat.source_M, flat.destination_row_M, flat.source_row_M)
    all_bits_M = np.bitwise_or.reduce([*spans, flat.num_columns_M * item_size])
    widest_M = np.minimum(all_bits_M & -all_bits_M, WORD_SIZES[0])  # the largest power of two that divides all of them
    word_M = np.where(is_run_M, widest_M, item_size)
    tiles_by_word = {}
    for word in np.unique(word_M).tolist():
        rows = flat.rows(word_M == word)
        is_run_N = is_run_M[word_M == word]
        joined = msgspec.structs.replace(
            rows,
            num_columns_M=np.where(is_run_N, rows.num_columns_M * item_size // word, rows.num_columns_M),
            destination_column_M=np.where(is_run_N, word, rows.destination_column_M),
            source_column_M=np.where(is_run_N, word, rows.source_column_M),
        )
        tiles_by_word[word] = _strides_over(_cut(joined), word, word)
    return tiles_by_word


def _merge_dims(copies: StridedCopies) -> StridedCopies:
    """Join dimensions that are adjacent in memory at both ends; right-align the rest."""
    num = len(copies)
    num_dims = max(2, copies.shape_CD.shape[1])
    copies = msgspec.structs.replace(
        copies,
        shape_CD=pad_dims(copies.shape_CD, num_dims, 1),
        destination_strides_CD=pad_dims(copies.destination_strides_CD, num_dims, 0),
        source_strides_CD=pad_dims(copies.source_strides_CD, num_dims, 0),
    )
    shape_CD = np.ones_like(copies.shape_CD)
    to_CD, from_CD = np.zeros_like(shape_CD), np.zeros_like(shape_CD)
    at_C = np.full(num, num_dims - 1)  # the outermost column in use
    every = np.arange(num)
    for dim in reversed(range(num_dims)):
        shape_C = copies.shape_CD[:, dim]
        to_C, from_C = copies.destination_strides_CD[:, dim], copies.source_strides_CD[:, dim]
        inner_C = shape_CD[every, at_C]
        is_adjacent_C = (to_C == to_CD[every, at_C] * inner_C) & (from_C == from_CD[every, at_C] * inner_C)
        is_first_C, is_single_C = inner_C == 1, shape_C == 1
        at_C = np.where(is_single_C | is_first_C | is_adjacent_C, at_C, at_C - 1)
        takes_C = ~is_single_C & (is_first_C | ~is_adjacent_C)  # starts its own column
        to_CD[every[takes_C], at_C[takes_C]] = to_C[takes_C]
        from_CD[every[takes_C], at_C[takes_C]] = from_C[takes_C]
        shape_CD[every, at_C] *= shape_C
    return StridedCopies(copies.destination_C, copies.source_C, shape_CD, to_CD, from_CD)


def _enumerate_outer(copies: StridedCopies) -> CopyTiles:
    """Return a tile, in bytes, for each index of the dimensions before the last two."""
    outer_CD = copies.shape_CD[:, :-2]
    num_C = outer_CD.prod(axis=1, dtype=np.int64)
    copy_M = np.repeat(np.arange(len(copies)), num_C)
    left_M = np.arange(len(copy_M)) - np.repeat(np.cumsum(num_C) - num_C, num_C)
    destination_M, source_M = copies.destination_C[copy_M], copies.source_C[copy_M]
    for dim in reversed(range(outer_CD.shape[1])):
        index_M = left_M % outer_CD[copy_M, dim]
        left_M = left_M // outer_CD[copy_M, dim]
        destination_M = destination_M + index_M * copies.destination_strides_CD[copy_M, dim]
        source_M = source_M + index_M * copies.source_strides_CD[copy_M, dim]
    shape_MD, to_MD, from_MD = (
        values_CD[copy_M, -2:]
        for values_CD in (copies.shape_CD, copies.destination_strides_CD, copies.source_strides_CD)
    )
    return CopyTiles(
        destination_M, source_M, shape_MD[:, 0], shape_MD[:, 1], to_MD[:, 0], from_MD[:, 0], to_MD[:, 1], from_MD[:, 1]
    )


def _cut(tiles: CopyTiles) -> CopyTiles:
    """Return tiles of at most `TILE_WORDS` words; strides in bytes."""
    columns_M = np.minimum(tiles.num_columns_M, TILE_WORDS)
    rows_M = np.minimum(tiles.num_rows_M, np.maximum(TILE_WORDS // columns_M, 1))
    across_M = -(-tiles.num_columns_M // columns_M)
    num_M = across_M * -(-tiles.num_rows_M // rows_M)
    which_N = np.repeat(np.arange(len(tiles)), num_M)
    number_N = np.arange(len(which_N)) - np.repeat(np.cumsum(num_M) - num_M, num_M)
    row_N, column_N = (
        number * step_M[which_N]
        for number, step_M in zip(np.divmod(number_N, across_M[which_N]), (rows_M, columns_M), strict=True)
    )
    of = tiles.rows(which_N)
    return msgspec.structs.replace(
        of,
        destination_M=of.destination_M + row_N * of.destination_row_M + column_N * of.destination_column_M,
        source_M=of.source_M + row_N * of.source_row_M + column_N * of.source_column_M,
        num_rows_M=np.minimum(rows_M[which_N], of.num_rows_M - row_N),
        num_columns_M=np.minimum(columns_M[which_N], of.num_columns_M - column_N),
    )


def _strides_over(tiles: CopyTiles, destination_size: int, source_size: int) -> CopyTiles:
    """Return the tiles with strides in words of the given sizes."""
    return msgspec.structs.replace(
        tiles,
        destination_row_M=tiles.destination_row_M // destination_size,
        source_row_M=tiles.source_row_M // source_size,
        destination_column_M=tiles.destination_column_M // destination_size,
        source_column_M=tiles.source_column_M // source_size,
    )


class CopyKernels:
    """Launches over tables on the GPU; it keeps the tensors, so that their addresses stay valid."""

    def __init__(self, launches: list[Callable[[], object]], tensors: list[torch.Tensor]) -> None:
        self._launches = launches
        self._tensors = tensors

    def launch(self) -> None:
        """Queue all copies on the current stream."""
        for launch in self._launches:
            launch()


def prepare(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> CopyKernels | None:
    """Return launches that copy each source to its destination; None without Triton.

    Torch copies pairs of types that the kernel does not convert.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    launches: list[Callable[[], object]] = []
    for (to, from_), rows in group_by_types(destinations, sources).items():
        tensor_pair = [destinations[row] for row in rows], [sources[row] for row in rows]
        if to == from_ or (to in _CONVERTED and from_ in _CONVERTED):
            for word, table in tiles(lay_out(*tensor_pair), to.itemsize, from_.itemsize, converts=to != from_).items():
                launches.append(_launch(table, word, to, from_, destinations[0].device))
        else:
            launches.append(functools.partial(torch._foreach_copy_, *tensor_pair))
    return CopyKernels(launches, [*destinations, *sources])


def group_by_types(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> dict[tuple[torch.dtype, torch.dtype], list[int]]:
    """Return the indices of non-empty pairs by their element types."""
    rows_by_types: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (to, from_) in enumerate(zip(destinations, sources, strict=True)):
        if to.numel():
            rows_by_types.setdefault((to.dtype, from_.dtype), []).append(index)
    return rows_by_types


def lay_out(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> StridedCopies:
    """Return pairs of tensors as addresses; all tensors of a side have one element type."""
    num_dims = max(tensor.dim() for tensor in destinations)
    shape_CD = _column(destinations, num_dims, lambda tensor: tensor.shape, 1)
    to_CD = _column(destinations, num_dims, lambda tensor: tensor.stride(), 0) * destinations[0].element_size()
    from_CD = _column(sources, num_dims, lambda tensor: tensor.stride(), 0) * sources[0].element_size()
    to_C, from_C = (np.array([t.data_ptr() for t in side], np.int64) for side in (destinations, sources))
    return StridedCopies(to_C, from_C, shape_CD, to_CD, from_CD)


def rows_of(table: ColumnTable) -> Ints:
    """Return a table with its columns side by side, as a kernel reads it."""
    return np.stack([getattr(table, field) for field in table.__struct_fields__], axis=1)


def _column(
    tensors: Sequence[torch.Tensor], num_dims: int, look: Callable[[torch.Tensor], Sequence[int]], fill: int
) -> Ints:
    rows = [(fill,) * (num_dims - tensor.dim()) + tuple(look(tensor)) for tensor in tensors]
    return np.array(rows, np.int64).reshape(len(rows), num_dims)


def _launch(
    table: CopyTiles, word: int, to: torch.dtype, from_: torch.dtype, device: torch.device
) -> Callable[[], object]:
    from tandem.refit import gpu_kernels  # which imports Triton

    table_M8 = torch.from_numpy(rows_of(table)).to(device)
    types: tuple[Any, Any] = gpu_kernels.types(word, to, from_)

    def launch() -> None:
        with torch.cuda.device(device):
            gpu_kernels.copy_tiles[(len(table_M8),)](table_M8, *types, BLOCK=_BLOCK)

    return launch
