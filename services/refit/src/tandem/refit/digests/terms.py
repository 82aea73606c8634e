"""The definition of a digest: a sum over elements that is the same however they are sharded.

The digest of a tensor is, modulo 2**64::

    D = s * sum_i  e(i) * m_1(i_1) * m_2(i_2) * ... * m_n(i_n)

Here ``m_k`` is an odd pseudo-random 64-bit number for each *global* index along dimension ``k``, and ``s`` one for each
name, shape and element type. ``e`` reads an element's bytes, from the lowest, as signed digits to base 256::

    e = b_0 + 256 * b_1 + 256**2 * b_2 + ...,    -128 <= b_j <= 127

``e`` differs for each bit pattern. A sum may be taken in any order and in any parts, so every sharding gives the same
number. Each term depends on the place of its element, so swapped tensors, exchanged rows, a shifted shard or a stale
tensor change the digest. So does any single flipped bit, because an odd number is invertible modulo 2**64.

``e`` has at most 32 bits, the sum 64. Modulo 2**32, and also for two float32 read as one 64-bit word, the sign bit
would be the top bit, where an even number of flips always cancels: a tensor with both halves negated would pass.
With 64 bits it weighs ``2**31 * m``, and 33 bits of ``m`` still count.

No torch here; `tandem.refit.digests.kernels` takes the sums.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

NUM_DIGITS = 8
"""Number of base-256 digits of a multiplier."""

_FEWEST_MULTIPLIERS = 2**10


@functools.lru_cache(maxsize=2**17)
def salt(name: str, global_shape: tuple[int, ...], dtype: str) -> int:
    """Return ``s``: an odd 64-bit number for a tensor's name, shape and element type."""
    return _hash(f"{name}|{global_shape}|{dtype}") | 1


_tables: dict[int, NDArray[np.int64]] = {}


def multipliers(dim: int, at_least: int) -> NDArray[np.int64]:
    """Return ``m`` for the first indices along a dimension, counted from the last one, which is 1.

    The table has at least `at_least` entries. It grows by doubling, and existing entries never change.
    """
    table = _tables.get(dim)
    if table is None or len(table) < at_least:
        num = max(_FEWEST_MULTIPLIERS, 1 << (at_least - 1).bit_length())
        table = _tables[dim] = _odd_numbers(_hash(f"dimension {dim}"), num)
    return table


def signed_digits(numbers_C: NDArray[np.int64], item_size: int) -> NDArray[np.int8]:
    """Return a matrix that turns the bytes of a row of elements into the digits of the row's sum.

    ``sum_c e(c) * m(c)`` is ``sum_j 256**j * (bytes @ matrix)_j`` modulo 2**64, where ``bytes`` are those of all
    elements in memory order, read as signed numbers.

    Args:
        numbers_C: the multipliers of C elements.
        item_size: bytes per element.

    Returns:
        Shape ``(C * item_size, 8)``. The row of byte b of an element holds the digits of its multiplier, each from
        -128 to 127, shifted by b places.

    """
    left_C = numbers_C.view(np.uint64).copy()
    digits_CBJ = np.zeros((len(left_C), item_size, NUM_DIGITS), np.int8)
    for digit in range(NUM_DIGITS):
        lowest_C = left_C.astype(np.int8)  # the eight lowest bits, as a signed number
        with np.errstate(over="ignore"):
            left_C = (left_C - lowest_C.astype(np.uint64)) >> np.uint64(8)
        for byte in range(min(item_size, NUM_DIGITS - digit)):
            digits_CBJ[:, byte, digit + byte] = lowest_C
    return digits_CBJ.reshape(-1, NUM_DIGITS)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _odd_numbers(seed: int, num: int) -> NDArray[np.int64]:
    """Return the first numbers of a splitmix64 stream (Steele, Lea and Flood 2014), made odd."""
    with np.errstate(over="ignore"):
        z = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z | np.uint64(1)).view(np.int64)
