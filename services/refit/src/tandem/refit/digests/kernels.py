"""The inner sums of a digest, on the CPU by the fastest exact kernel of the processor, and on a GPU.

On a CPU the sum over columns is taken in C, which the machine's compiler makes 16-bit dot products of
(`tandem.refit.digests.compiled_sums`). Without a compiler it is a product of two byte matrices: the elements, and the
digits of the multipliers (`tandem.refit.digests.terms.signed_digits`). If torch has no exact and fast kernel for that,
elements are widened to 64 bits and multiplied as integers. On a GPU a Triton kernel does that in one pass over memory.
All kernels give the same number.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Sequence

import torch

from tandem.common.errors import RefitError
from tandem.refit.digests import compiled_sums, terms

_FEW_COLUMNS = 2**8
"""Shorter rows are joined if the dimensions outside them allow it."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_LOWER_SIGNS = {1: 0, 2: 0x80, 4: 0x808080}
"""The top bit of each byte but the last."""
Span = tuple[int, int, int, int]
"""Global indices along one dimension: the dimension (1 is the last), the first index, the count, the step."""
Kernel = Callable[[torch.Tensor, tuple[Span, ...]], torch.Tensor]
"""Sums over columns: from rows of a signed integer type, with unit stride within a row, to an int64 sum of each row."""

MAX_COLUMNS = 2**14
"""Elements of a row summed at once: with 4-byte elements, a sum of 2**16 products of two bytes fits 32 bits."""


def fastest_exact(kernels: Sequence[Kernel], wide: Kernel) -> Kernel:
    """Return the fastest of some kernels that are exact on this processor, and of the wide one, which always is."""
    extreme_RC, columns = _extremes()
    exact_kernels = [kernel for kernel in kernels if is_exact(kernel, wide)]
    return min((*exact_kernels, wide), key=lambda kernel: _seconds(kernel, extreme_RC, columns))


def is_exact(kernel: Kernel, wide: Kernel) -> bool:
    """Check that a kernel adds exactly on this processor.

    Without 8-bit dot products, pairs of products are added in 16 bits that saturate. Two processes that each chose the
    faster kernel would then disagree about the same weights.
    """
    extreme_RC, columns = _extremes()
    views = [extreme_RC.view(integers)[:, :MAX_COLUMNS] for integers in _INTEGERS.values()]
    return all(torch.equal(kernel(words_RC, columns), wide(words_RC, columns)) for words_RC in views)


def _extremes() -> tuple[torch.Tensor, tuple[Span, ...]]:
    """Return the words and columns with the largest possible sums.

    Every byte is at its minimum in half of the rows and at its maximum in the others. Both are needed: libraries first
    shift bytes to 0..255, and then only the highest saturate.
    """
    lowest_RC = torch.full((8, MAX_COLUMNS), -0x7F7F7F80, dtype=torch.int32)
    highest_RC = torch.full((8, MAX_COLUMNS), 0x7F7F7F7F, dtype=torch.int32)
    return torch.cat([lowest_RC, highest_RC]), ((1, 0, MAX_COLUMNS, 1),)


def _seconds(kernel: Kernel, words_RC: torch.Tensor, columns: tuple[Span, ...]) -> float:
    best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        kernel(words_RC, columns)
        best = min(best, time.perf_counter() - started)
    return best


def slab_sum(values: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    """Return the sum of `add_slab_sum`: a scalar of type int64 on the device of `values`."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    add_slab_sum(total, values, spans)
    return total


def add_slab_sum(total: torch.Tensor, values: torch.Tensor, spans: list[Span]) -> None:
    """Add ``sum_i e(i) * m_1(i_1) * ... * m_n(i_n)`` modulo 2**64 over a small slice of a tensor.

    Args:
        total: a scalar of type int64 on the device of `values`.
        values: elements of 1, 2 or 4 bytes, any strides, at least one dimension and one element, and at most
            `MAX_COLUMNS` along the last dimension.
        spans: global indices of the slice along each dimension, from the first.

    Raises:
        RefitError: the elements have another size.

    """
    if values.element_size() not in _INTEGERS:
        raise RefitError(f"element type {values.dtype}: digests are of elements of 1, 2 or 4 bytes")
    first = len(spans) - 1
    num_columns = spans[first][2]
    while first and num_columns < _FEW_COLUMNS and num_columns * spans[first - 1][2] <= MAX_COLUMNS:
        first -= 1
        num_columns *= spans[first][2]
    words_RC = values.reshape(-1, num_columns)
    if words_RC.stride(1) != 1:  # copy even a single column, which may have any stride
        words_RC = words_RC.clone(memory_format=torch.contiguous_format)
    words_RC = words_RC.view(_INTEGERS[values.element_size()])
    columns = tuple(spans[first:])
    rows_R = _products(spans[:first], values.device) if first else _make_one(values.device)
    if values.is_cuda and _has_triton():
        from tandem.refit.gpu_kernels import add_products

        lower_signs = _LOWER_SIGNS[values.element_size()]
        add_products(total, words_RC, rows_R, _products(columns, values.device), lower_signs)
        return
    kernel = _device_sums if values.is_cuda else _cpu_kernel()
    total.add_((kernel(words_RC, columns) * rows_R).sum())


@functools.cache
def _make_one(device: torch.device) -> torch.Tensor:
    """Return the multiplier of the only row of a vector."""
    return torch.ones(1, dtype=torch.int64, device=device)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _products(spans: list[Span] | tuple[Span, ...], device: torch.device) -> torch.Tensor:
    """Return the products of multipliers for all combinations of indices, the last dimension varying fastest."""
    joined = _multipliers(spans[0], device)
    for span in spans[1:]:
        joined = (joined[:, None] * _multipliers(span, device)).view(-1)
    return joined


_tables: dict[tuple[int, torch.device], torch.Tensor] = {}


def _multipliers(span: Span, device: torch.device) -> torch.Tensor:
    dim, first, num, step = span
    stop = first + (num - 1) * step + 1
    table = _tables.get((dim, device))
    if table is None or len(table) < stop:
        table = _tables[dim, device] = torch.from_numpy(terms.multipliers(dim, stop)).to(device)
    return table[first:stop:step]


# --- sums over columns: words_RC of a signed integer type, unit stride within a row; returns sums_R, int64 ---


def _byte_sums(words_RC: torch.Tensor, columns: tuple[Span, ...]) -> torch.Tensor:
    """Multiply bytes by digits, exactly, in 32 bits."""
    digits_KJ, powers_J = _digits(columns, words_RC.element_size())
    sums_RJ = torch._int_mm(words_RC.view(torch.int8), digits_KJ)
    return torch.mv(sums_RJ.long(), powers_J)


def _compiled_sums() -> list[Kernel]:
    """Return the compiled kernel; none if no compiler is here."""
    library = compiled_sums.load()
    if library is None:
        return []

    def sum_words(words_RC: torch.Tensor, columns: tuple[Span, ...]) -> torch.Tensor:
        """Multiply 16-bit words by digits, exactly, in 32 bits."""
        return sum_rows(library, words_RC, _word_digits(columns, words_RC.element_size()))

    return [sum_words]


def sum_rows(library: ctypes.CDLL, words_RC: torch.Tensor, digits: compiled_sums.WordDigits) -> torch.Tensor:
    """Return the sums of `compiled_sums.load`, of rows with unit stride within each."""
    num_rows, item_size = words_RC.shape[0], words_RC.element_size()
    sums_R = torch.empty(num_rows, dtype=torch.int64)
    add_up = library.sum_rows_of_bytes if item_size == 1 else library.sum_rows_of_halves
    add_up(words_RC.data_ptr(), words_RC.stride(0) * item_size, num_rows, *digits.arguments, sums_R.data_ptr())
    return sums_R


def _wide_sums(words_RC: torch.Tensor, columns: tuple[Span, ...]) -> torch.Tensor:
    """Widen to 64 bits and multiply as integers, a few rows at a time so that they stay in the cache."""
    multipliers_C = _products(columns, words_RC.device)
    rows_at_once = max(1, 2**17 // len(multipliers_C))
    return torch.cat([torch.mv(_widen(block), multipliers_C) for block in torch.split(words_RC, rows_at_once)])


def _device_sums(words_RC: torch.Tensor, columns: tuple[Span, ...]) -> torch.Tensor:
    """Sum like `_wide_sums`, without the matrix-vector product of integers that CUDA lacks."""
    return (_widen(words_RC) * _products(columns, words_RC.device)).sum(dim=1)


def _widen(words_RC: torch.Tensor) -> torch.Tensor:
    """Return ``e`` of each element, int64. Flipping a byte's top bit and subtracting it turns 0..255 to -128..127."""
    lower_signs = _LOWER_SIGNS[words_RC.element_size()]
    wide_RC = words_RC.long()
    return wide_RC.bitwise_xor_(lower_signs).sub_(lower_signs) if lower_signs else wide_RC


@functools.lru_cache(maxsize=64)
def _digits(columns: tuple[Span, ...], item_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the digits of the columns' multipliers, one row per byte, and the weight of each digit."""
    multipliers_C = _products(columns, torch.device("cpu"))
    digits_KJ = torch.from_numpy(terms.signed_digits(multipliers_C.contiguous().numpy(), item_size))
    return digits_KJ, 256 ** torch.arange(terms.NUM_DIGITS)


@functools.lru_cache(maxsize=64)
def _word_digits(columns: tuple[Span, ...], item_size: int) -> compiled_sums.WordDigits:
    """Return the digits of the columns' multipliers for the compiled kernel."""
    multipliers_C = _products(columns, torch.device("cpu")).contiguous()
    return compiled_sums.WordDigits(multipliers_C.numpy(), item_size)


@functools.cache
def _cpu_kernel() -> Kernel:
    """Return the fastest kernel that is exact on this processor."""
    return fastest_exact([*_compiled_sums(), _byte_sums], _wide_sums)


@functools.cache
def cpu_bytes_per_s() -> float:
    """Return the rough rate of digests on one core, in bytes a second: that of the chosen kernel."""
    extreme_RC, columns = _extremes()
    return extreme_RC.nbytes / _seconds(_cpu_kernel(), extreme_RC, columns)
