"""Algebra on millions of slices: which of them intersect, and which are equal.

A sweep sorts slices by tensor and by their start along the tensor's most cut dimension, so that only neighbours are
compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.refit.columns import Ints

MOST_PAIRS = 1 << 20
"""Pairs of slices compared at a time, which bounds the memory of a sweep."""

Hashes = NDArray[np.uint64]


class SliceMeetings(msgspec.Struct, frozen=True, eq=False):
    """Non-empty intersections of given slices with those of an index: N rows."""

    want_N: Ints
    box_N: Ints
    start_ND: Ints
    shape_ND: Ints


def ranges(first_N: Ints, count_N: Ints) -> tuple[Ints, Ints]:
    """Return ``(n, value)`` for every value in ``first[n] .. first[n] + count[n] - 1``, range after range."""
    owner_M = np.repeat(np.arange(len(count_N)), count_N)
    starts_N = np.cumsum(count_N) - count_N
    return owner_M, np.arange(len(owner_M)) - starts_N[owner_M] + first_N[owner_M]


def hash_rows(*columns: Ints) -> Hashes:
    """Return a 64-bit hash of each row of columns of shape ``(N,)`` or ``(N, D)``."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            for values in _wide(column).T:
                mixed = (mixed ^ values.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
                mixed ^= mixed >> np.uint64(32)
    return mixed


def _wide(column: Ints) -> Ints:
    return column if column.ndim == 2 else column[:, None]


def group_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Group equal rows of columns of shape ``(N,)`` or ``(N, D)``.

    Returns:
        ``(first_G, group_N)``: a row of each group, and the group of each row.

    """
    _, first_G, group_N = np.unique(hash_rows(*columns), return_index=True, return_inverse=True)
    if all(np.array_equal(column, column[first_G][group_N]) for column in columns):
        return first_G, group_N
    table = np.concatenate([_wide(column) for column in columns], axis=1)  # two different rows have the same hash
    _, first_G, group_N = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first_G, group_N.reshape(-1)


def slabs(count_N: Ints, max_pairs: int = MOST_PAIRS) -> Iterator[slice]:
    """Yield ranges of rows with counts that add up to at most about `max_pairs`."""
    ends_N = np.cumsum(count_N)
    start = 0
    while start < len(count_N):
        pairs_before = ends_N[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends_N, pairs_before + max_pairs, "right")))
        yield slice(start, stop)
        start = stop


class BoxIndex:
    """Slices of many tensors, sorted so that intersections are found quickly.

    Args:
        tensor_B: the tensor of each slice.
        start_BD: first element.
        shape_BD: elements along each dimension; never 0.

    """

    def __init__(self, tensor_B: Ints, start_BD: Ints, shape_BD: Ints) -> None:
        self.tensor_B, self.start_BD, self.shape_BD = tensor_B, start_BD, shape_BD
        self._num_tensors = int(tensor_B.max()) + 1 if len(tensor_B) else 0
        self._radix = int((start_BD + shape_BD).max()) + 1 if start_BD.size else 1
        self._axis_T = self._find_most_cut_axes()
        start_B, extent_B = self._along(tensor_B, start_BD), self._along(tensor_B, shape_BD)
        key_B = tensor_B * self._radix + start_B
        self._order_B = np.argsort(key_B, kind="stable")
        self._key_B = key_B[self._order_B]
        self._longest_T = np.zeros(self._num_tensors, np.int64)
        np.maximum.at(self._longest_T, tensor_B, extent_B)

    def meet(self, tensor_W: Ints, start_WD: Ints, shape_WD: Ints) -> Iterator[SliceMeetings]:
        """Yield the intersections of slices with the indexed ones, in batches."""
        if not self._num_tensors:
            return
        known_W = np.flatnonzero(tensor_W < self._num_tensors)
        tensor_K = tensor_W[known_W]
        base_K = tensor_K * self._radix
        start_K, extent_K = self._along(tensor_K, start_WD[known_W]), self._along(tensor_K, shape_WD[known_W])
        near_K = np.clip(start_K - self._longest_T[tensor_K] + 1, 0, self._radix)
        first_K = np.searchsorted(self._key_B, base_K + near_K)
        last_K = np.searchsorted(self._key_B, base_K + np.clip(start_K + extent_K, 0, self._radix))
        count_K = np.maximum(last_K - first_K, 0)
        for slab in slabs(count_K):
            at_M, place_M = ranges(first_K[slab], count_K[slab])
            want_M, box_M = known_W[slab][at_M], self._order_B[place_M]
            start_MD = np.maximum(start_WD[want_M], self.start_BD[box_M])
            stop_MD = np.minimum(start_WD[want_M] + shape_WD[want_M], self.start_BD[box_M] + self.shape_BD[box_M])
            meets_M = (stop_MD > start_MD).all(axis=1)
            yield SliceMeetings(
                want_M[meets_M], box_M[meets_M], start_MD[meets_M], stop_MD[meets_M] - start_MD[meets_M]
            )

    def overlap(self) -> tuple[int, int] | None:
        """Return two different slices of one tensor that overlap, or None."""
        crowded_T = np.bincount(self.tensor_B, minlength=self._num_tensors) > 1
        rows = np.flatnonzero(crowded_T[self.tensor_B]) if self._num_tensors else np.zeros(0, np.int64)
        if not len(rows):
            return None
        for met in self.meet(self.tensor_B[rows], self.start_BD[rows], self.shape_BD[rows]):
            overlapping = np.flatnonzero(rows[met.want_N] != met.box_N)
            if len(overlapping):
                pair = int(rows[met.want_N[overlapping[0]]]), int(met.box_N[overlapping[0]])
                return min(pair), max(pair)
        return None

    def _along(self, tensor_N: Ints, values_ND: Any) -> Ints:
        """Return each row's value along its tensor's axis."""
        along: Ints = values_ND[np.arange(len(tensor_N)), self._axis_T[tensor_N]]
        return along

    def _find_most_cut_axes(self) -> Ints:
        num_dims = self.start_BD.shape[1]
        cuts_DT = np.zeros((num_dims, self._num_tensors), np.int64)
        for dim in range(num_dims):
            keys = np.unique(self.tensor_B * self._radix + self.start_BD[:, dim])
            cuts_DT[dim] = np.bincount(keys // self._radix, minlength=self._num_tensors)
        axis_T: Ints = cuts_DT.argmax(axis=0)
        return axis_T
