"""Digests of weights that do not depend on how the weights are sharded.

The digest of a tensor is a sum over its elements, modulo 2**64::

    D = s * sum_i  bits(i) * m_1(i_1) * m_2(i_2) * ... * m_n(i_n)

where ``bits`` reads an element as a signed integer, ``m_k`` is an odd pseudo-random 64-bit number for each *global*
index along dimension ``k``, and ``s`` is one for each name, shape and element type. A sum may be taken in any order and
in any parts, so every sharding gives the same number. Each term depends on where its element belongs, so swapped
tensors, exchanged rows, a shifted shard or a stale tensor change it; and because an odd number is invertible modulo
2**64, so does any single flipped bit.

Elements of at most 32 bits are widened to 64 first. Modulo 2**32, and also for two float32 read as one 64-bit word,
the sign bit would stand at the top, where an even number of flips always cancels: a tensor whose halves are negated
would pass. Widened, its weight is ``2**31 * m`` and 33 bits of ``m`` still count.

The inner sum is an integer matrix-vector product over blocks that stay in the cache.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RefitError
from tandem.refit.layout import ITEM_SIZES, Box, Layout

if TYPE_CHECKING:  # the refit service combines digests without torch
    import torch

_MODULUS = 2**64
_BLOCK_ELEMENTS = 2**17
"""Elements widened at a time: 1 MiB of 64-bit integers."""
_FEWEST_MULTIPLIERS = 2**10


def digest_box(name: str, global_shape: tuple[int, ...], box: Box, values: torch.Tensor) -> int:
    """Return a box's share of the digest of tensor `name`.

    Args:
        name: Hugging Face name of the tensor.
        global_shape: shape of the whole tensor.
        box: the part that `values` holds.
        values: of the box's shape, any strides, elements of 1, 2 or 4 bytes.

    Returns:
        An unsigned 64-bit number; add shares up with `combine`.

    Raises:
        RefitError: the elements have another size.

    """
    import torch

    if box.num_elements == 0:
        return 0
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(values.element_size())
    if integers is None:
        raise RefitError(f"{name} has element type {values.dtype}: digests are of elements of 1, 2 or 4 bytes")
    assert tuple(values.shape) == box.shape, f"{name}: {tuple(values.shape)} is not the shape of {box}"
    shape = box.shape or (1,)
    first = box.start or (0,)
    bits = values.detach().view(integers).reshape(shape)
    *outer, columns = (
        torch.from_numpy(_multipliers(len(shape) - dim, start + n)[start : start + n])
        for dim, (start, n) in enumerate(zip(first, shape, strict=True))
    )
    sums = _row_sums(bits.reshape(-1, shape[-1]), columns)
    for multipliers in reversed(outer):
        sums = torch.mv(sums.view(-1, len(multipliers)), multipliers)
    dtype = str(values.dtype).removeprefix("torch.")
    return int(sums.item()) * _salt(name, global_shape, dtype) % _MODULUS


def digest_layout(layout: Layout, storages: Mapping[str, torch.Tensor]) -> int:
    """Return the digest of everything that a layout describes, read from where it says that it lies.

    Args:
        layout: what the process holds.
        storages: by name of the storage, a tensor whose first element is byte 0 and that lies in one gapless range.

    Raises:
        RefitError: as `digest_box`.

    """
    import torch

    shares: list[int] = []
    for name, tensor in layout.tensors.items():
        dtype, item_size = getattr(torch, tensor.dtype), ITEM_SIZES[tensor.dtype]
        for piece in tensor.pieces:
            storage = storages[piece.parameter].detach()
            flat = storage.as_strided((storage.numel(),), (1,)).view(dtype)
            strides = [stride // item_size for stride in piece.strides]
            place = flat.as_strided(piece.box.shape, strides, flat.storage_offset() + piece.offset // item_size)
            shares.append(digest_box(name, tensor.shape, piece.box, place))
    return combine(*shares)


def combine(*digests: int) -> int:
    """Add shares up, modulo 2**64."""
    return sum(digests) % _MODULUS


def _row_sums(bits_RC: torch.Tensor, multipliers_C: torch.Tensor) -> torch.Tensor:
    """Return ``sum_c bits_RC * multipliers_C`` as ``sums_R``, wrapping around."""
    import torch

    num_rows, num_columns = bits_RC.shape
    rows_per_block = max(1, _BLOCK_ELEMENTS // num_columns)
    sums_R = torch.empty(num_rows, dtype=torch.int64)
    wide_BC = torch.empty((min(rows_per_block, num_rows), num_columns), dtype=torch.int64)
    for row in range(0, num_rows, rows_per_block):
        block_BC = bits_RC[row : row + rows_per_block]
        wide = wide_BC[: len(block_BC)].copy_(block_BC)
        torch.mv(wide, multipliers_C, out=sums_R[row : row + rows_per_block])
    return sums_R


@functools.lru_cache(maxsize=65536)
def _salt(name: str, global_shape: tuple[int, ...], dtype: str) -> int:
    seed = hashlib.blake2b(f"{name}|{global_shape}|{dtype}".encode(), digest_size=8).digest()
    return int.from_bytes(seed, "little") | 1


_tables: dict[int, NDArray[np.int64]] = {}


def _multipliers(dim: int, at_least: int) -> NDArray[np.int64]:
    """Return ``m`` for the first indices along a dimension, counted from the last one; the table grows by doubling."""
    table = _tables.get(dim)
    if table is None or len(table) < at_least:
        num = max(_FEWEST_MULTIPLIERS, 1 << (at_least - 1).bit_length())
        table = _tables[dim] = _odd_numbers(dim, num)
    return table


def _odd_numbers(stream: int, num: int) -> NDArray[np.int64]:
    """Return the first odd 64-bit numbers of a stream: splitmix64 (Steele, Lea and Flood 2014), made odd."""
    seed = int.from_bytes(hashlib.blake2b(f"dimension {stream}".encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        z = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z | np.uint64(1)).view(np.int64)
