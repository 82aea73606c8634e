"""Digests of weights that do not depend on how the weights are sharded.

A tensor is read as a matrix ``W`` of its bits: one row for each index of its first dimension, one column for each index
of the others taken together. Its digest is the bilinear form ``sum_rc a_r W_rc b_c`` modulo 2**32, with odd
pseudo-random ``a_r`` and ``b_c`` that depend on the tensor's name and on the *global* row and column. The sum may be
taken in any order and in any parts, so every sharding gives the same number; but each term depends on where its element
belongs, so a swap, a shift or a stale tensor changes it, and because odd numbers are invertible modulo 2**32 so does
any single flipped bit. Two such forms with independent vectors, side by side, make 64 bits.

Reading everything costs about as much as copying it; torch does the inner sum as an integer matrix-vector product.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tandem.refit.layout import Box

if TYPE_CHECKING:  # the refit service combines digests without torch
    import torch

_LANE = 2**32
_NUM_LANES = 2


def digest_box(name: str, global_shape: tuple[int, ...], box: Box, values: torch.Tensor) -> int:
    """Return a box's share of the digest of tensor `name`.

    Args:
        name: Hugging Face name of the tensor.
        global_shape: shape of the whole tensor.
        box: the part that `values` holds.
        values: of the box's shape, any element type of 2 or 4 bytes.

    Returns:
        An unsigned 64-bit number; add shares up with `combine`.

    """
    import torch

    if box.num_elements == 0:
        return 0
    bits = values.detach().contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()]).to(torch.int32)
    bits_RC = bits.reshape(box.shape[0] if box.shape else 1, -1)
    digest = 0
    for lane in range(_NUM_LANES):
        columns = torch.from_numpy(_columns(name, lane, global_shape[1:], box.start[1:], box.shape[1:]))
        rows = torch.from_numpy(_odd(name, lane, "rows", box.start[0] if box.shape else 0, bits_RC.shape[0]))
        row_sums_R = torch.mv(bits_RC, columns)  # wraps around modulo 2**32
        lane_sum = int((row_sums_R.to(torch.int64) * rows.to(torch.int64) % _LANE).sum()) % _LANE
        digest |= lane_sum << (32 * lane)
    return digest


def combine(*digests: int) -> int:
    """Add shares up: lane by lane, so that no carry runs from one into the other."""
    total = 0
    for lane in range(_NUM_LANES):
        lane_sum = sum((digest >> (32 * lane)) % _LANE for digest in digests) % _LANE
        total |= lane_sum << (32 * lane)
    return total


@functools.lru_cache(maxsize=4096)
def _columns(
    name: str, lane: int, global_shape: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...]
) -> NDArray[np.int32]:
    """Return ``b_c`` for the columns of a box: the trailing dimensions, flattened by their global index."""
    if not shape:
        return _odd(name, lane, "columns", 0, 1)
    index = np.zeros((1,), dtype=np.int64)
    for size, first, count in zip(global_shape, start, shape, strict=True):
        index = (index[:, None] * size + np.arange(first, first + count)[None, :]).reshape(-1)
    return _hash_odd(_seed(name, lane, "columns"), index)


@functools.lru_cache(maxsize=4096)
def _odd(name: str, lane: int, what: str, first: int, count: int) -> NDArray[np.int32]:
    return _hash_odd(_seed(name, lane, what), np.arange(first, first + count, dtype=np.int64))


def _seed(name: str, lane: int, what: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name}|{lane}|{what}".encode(), digest_size=8).digest(), "little")


def _hash_odd(seed: int, index: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return an odd 32-bit number for each index: splitmix64 (Steele, Lea and Flood 2014) of seed and index."""
    with np.errstate(over="ignore"):
        z = (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(32)).astype(np.uint32).view(np.int32) | np.int32(1)
