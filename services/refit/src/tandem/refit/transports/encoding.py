"""Encodings of a message by what changed in it, for a receiver that holds the bytes from before.

A message is a vector of integers, whatever its elements mean: two that are equal bit by bit are unchanged. What changed
is written as positions and values, in the smallest of these ways:

- ``NOTHING``: no byte.
- ``GAPS_8``, ``GAPS_16``: the values, then the number of unchanged integers before each, in one or two bytes. The
  largest number that fits stands for so many unchanged integers, and another follows it.
- ``BITMAP``: the values, then a bit for each integer.
- ``WHOLE``: the message itself.

All of it is torch's operators, on the device of the message. On a CPU numpy finds positions, several times as fast.
"""

from __future__ import annotations

import enum
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.errors import RefitError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their bytes."""

_BLOCK_BYTES = 1 << 20
"""Bytes compared at a time on a CPU, so that what is known of them stays in its cache."""

_ALIGNMENT = 8
"""Positions begin at a multiple of so many bytes."""

_ESCAPES = {1: 0xFF, 2: 0xFFFF}
"""Numbers that stand for unchanged integers without a changed one behind them, by bytes of a number."""

_FEW = 16
"""Integers to each that has changed, above which gaps are written; below, a bitmap is as small and made sooner."""

_MANY = 0.9
"""Share of changed integers in the first block from which the rest is not looked at."""

_CROWDED = 0.6
"""Share of eights with something true, above which a tenth of all is true."""

_SHORT = 1 << 14
"""Number of booleans up to which it takes longer to look at eight as one."""

_FEWEST_INTEGERS = 1 << 20
"""Least integers for each thread, so that it is worth its start."""

_GATHER_BITS = 0x0102040810204080


class EncodingKind(enum.IntEnum):
    """Ways to write a change."""

    NOTHING = 0
    GAPS_8 = 1
    GAPS_16 = 2
    BITMAP = 3
    WHOLE = 4


class MessageDifference(NamedTuple):
    """A message, written as its difference from an older one."""

    kind: EncodingKind
    num_changed: int
    """Number of changed integers; 0 if the message is whole."""
    num_gaps: int
    """Number of gaps; 0 for kinds without."""
    bytes_: torch.Tensor
    """Contiguous uint8 tensor; without elements if nothing changed."""


def num_bytes(kind: EncodingKind, num_changed: int, num_gaps: int, size: int, length: int) -> int:
    """Return the bytes of a change of a message of `length` integers of `size` bytes each."""
    if kind is EncodingKind.NOTHING:
        return 0
    if kind is EncodingKind.WHOLE:
        return length * size
    positions = -(-length // 8) if kind is EncodingKind.BITMAP else num_gaps * int(kind)
    return _pad(num_changed * size) + positions


def advance(old: torch.Tensor, new: torch.Tensor, largest: float = 1.0) -> MessageDifference:
    """Make `old` equal to `new`, and return the change, whole if a larger share than this has changed.

    Both are vectors of one length, one type, which is one of `INTEGERS`, and one device.
    """
    changed = _take_changed(old, new, min(_MANY, 1.25 * largest))
    length, size = new.numel(), new.element_size()
    if changed is None:
        return wrap(old.copy_(new))
    positions, values = changed
    num = positions.numel()
    if not num:
        return MessageDifference(EncodingKind.NOTHING, 0, 0, new.new_empty(0, dtype=torch.uint8))
    kind, numbers = EncodingKind.BITMAP, None
    if _FEW * num < length:
        kind, numbers = _gaps(positions)
    num_gaps = 0 if numbers is None else numbers.numel()
    needed = num_bytes(kind, num, num_gaps, size, length)
    if needed >= length * size or num > largest * length:
        return wrap(old)
    written = new.new_empty(needed, dtype=torch.uint8)
    written[: num * size].view(new.dtype).copy_(values)
    written[num * size : _pad(num * size)] = 0
    behind = written[_pad(num * size) :]
    if numbers is None:
        is_changed = torch.zeros(-(-length // 8) * 8, dtype=torch.bool, device=new.device)
        behind.copy_(_pack_bits(is_changed.scatter_(0, positions, True)))
    else:
        behind.copy_(numbers.view(torch.uint8))
    return MessageDifference(kind, num, num_gaps, written)


def _gaps(positions: torch.Tensor) -> tuple[EncodingKind, torch.Tensor]:
    """Return the gaps before positions as one or two bytes each, whichever are fewer."""
    gaps = torch.diff(positions.to(torch.int32), prepend=positions.new_full((1,), -1, dtype=torch.int32)).sub_(1)
    by_kind: dict[EncodingKind, tuple[int, torch.Tensor, torch.Tensor]] = {}
    for kind in (EncodingKind.GAPS_8, EncodingKind.GAPS_16):
        skips = gaps.to(torch.float64).add_(0.5).mul_(1 / _ESCAPES[kind]).to(torch.int32)  # as // is, but many at once
        remainders = gaps - skips * _ESCAPES[kind]
        places = torch.cumsum(skips.add_(1), 0)  # of what follows each gap
        by_kind[kind] = int(places[-1]), places, remainders
        if by_kind[kind][0] * int(kind) <= 2 * len(positions):
            break  # two bytes for each cannot be fewer
    kind = min(by_kind, key=lambda candidate: by_kind[candidate][0] * int(candidate))
    (num_gaps, places, remainders), dtype = by_kind[kind], torch.uint8 if kind is EncodingKind.GAPS_8 else torch.int16
    if num_gaps == len(positions):
        return kind, remainders.to(dtype)
    numbers = torch.full((num_gaps,), -1, dtype=torch.int16, device=positions.device).to(dtype)
    return kind, numbers.scatter_(0, places.sub_(1), remainders.to(dtype))


def apply(change: MessageDifference, target: torch.Tensor) -> None:
    """Make the old message in `target` the new one. Raises `RefitError` if the change is not one of such a message."""
    kind, num, num_gaps, written = change
    length, size = target.numel(), target.element_size()
    if written.numel() != num_bytes(kind, num, num_gaps, size, length):
        raise RefitError("a difference has another number of bytes than it says")
    if kind is EncodingKind.NOTHING:
        return
    if kind is EncodingKind.WHOLE:
        target.copy_(written.view(target.dtype))
        return
    values, behind = written[: num * size].view(target.dtype), written[_pad(num * size) :]
    if kind is EncodingKind.BITMAP:
        positions = _positions(_unpack_bits(behind))
    else:
        numbers = (
            behind.to(torch.int32) if kind is EncodingKind.GAPS_8 else behind.view(torch.int16).to(torch.int32) & 0xFFFF
        )
        is_end = numbers != _ESCAPES[kind]
        positions = torch.cumsum(numbers.add_(is_end), 0).sub_(1).index_select(0, _positions(is_end))
    if positions.numel() != num or (num and int(positions[-1]) >= length):  # they ascend, whatever the bytes are
        raise RefitError("a difference has positions that its message has not")
    target.scatter_(0, positions, values)


def wrap(message: torch.Tensor) -> MessageDifference:
    """Return a message as a change, without a copy."""
    return MessageDifference(EncodingKind.WHOLE, 0, 0, message.view(torch.uint8))


def _pad(num: int) -> int:
    """Return the bytes that values take, so that positions behind them are aligned."""
    return -(-num // _ALIGNMENT) * _ALIGNMENT


class _Taken(NamedTuple):
    """Positions and values of what has changed in a part of a message, block by block."""

    positions: list[NDArray[np.int64]]
    values: list[NDArray[Any]]


def _take_changed(old: torch.Tensor, new: torch.Tensor, many: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Make `old` equal to `new`; return the positions at which they differed, ascending, and the values of `new` there.

    None, and `old` is not yet equal, if more than the share `many` of the first block of a part differs. There is a
    part for each thread that torch may use.
    """
    if new.device.type != "cpu":
        positions = _positions(new != old)
        values = new.index_select(0, positions)
        old.scatter_(0, positions, values)
        return positions, values
    old_N, new_N = old.numpy(), new.numpy()
    num = min(torch.get_num_threads(), len(new_N) // _FEWEST_INTEGERS)
    if num < 2:
        parts = [_take_part(old_N, new_N, 0, many)]
    else:
        step = -(-len(new_N) // num)
        with ThreadPoolExecutor(num) as pool:
            firsts = range(0, len(new_N), step)
            parts = list(
                pool.map(lambda at: _take_part(old_N[at : at + step], new_N[at : at + step], at, many), firsts)
            )
    taken_parts = [part for part in parts if part is not None]
    if len(taken_parts) < len(parts):
        return None
    positions_N = np.concatenate([each for part in taken_parts for each in part.positions])
    values_N = np.concatenate([each for part in taken_parts for each in part.values])
    return torch.from_numpy(positions_N), torch.from_numpy(values_N)


def _take_part(old_N: NDArray[Any], new_N: NDArray[Any], offset: int, many: float) -> _Taken | None:
    """Do what `_take_changed` does with the integers that begin at an offset."""
    step = _BLOCK_BYTES // new_N.itemsize
    positions, values_of = [np.empty(0, np.int64)], [np.empty(0, new_N.dtype)]
    differs_S = np.empty(step, np.bool_)
    for first in range(0, len(new_N), step):
        old_S, new_S = old_N[first : first + step], new_N[first : first + step]
        np.not_equal(new_S, old_S, out=differs_S[: len(new_S)])
        differs_S[len(new_S) :] = False
        block_positions = _true(differs_S)
        if not first and len(block_positions) > many * len(new_S):
            return None
        values_of.append(new_S.take(block_positions))
        old_S[block_positions] = values_of[-1]
        block_positions += offset + first
        positions.append(block_positions)
    return _Taken(positions, values_of)


def _true(is_true_S: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the positions of what is true, ascending.

    numpy finds them without branches where more than a tenth is true; elsewhere it guesses a branch for each, and is
    wrong for most. So eight are looked at as one first, and eight of those, until enough of them have something true.
    """
    if len(is_true_S) < _SHORT:
        return np.flatnonzero(is_true_S)
    num_tail = len(is_true_S) % 8
    eights = is_true_S[: len(is_true_S) - num_tail].view(np.int64)
    has_true = eights != 0
    if np.count_nonzero(has_true) > _CROWDED * len(eights):
        return np.flatnonzero(is_true_S)
    which = _true(has_true)
    within = np.flatnonzero(eights.take(which).view(np.bool_))
    positions = which.take(within >> 3)
    positions <<= 3
    within &= 7
    positions += within
    return (
        np.append(positions, np.flatnonzero(is_true_S[-num_tail:]) + len(is_true_S) - num_tail)
        if num_tail
        else positions
    )


def _positions(is_true: torch.Tensor) -> torch.Tensor:
    if is_true.device.type == "cpu":
        return torch.from_numpy(_true(is_true.numpy()))
    return is_true.nonzero().view(-1)


def _pack_bits(is_true: torch.Tensor) -> torch.Tensor:
    """Return eight booleans a byte, the first as the lowest bit."""
    if is_true.device.type == "cpu":
        return torch.from_numpy(np.packbits(is_true.numpy(), bitorder="little"))
    return (((is_true.view(torch.int64) * _GATHER_BITS) >> 56) & 0xFF).to(torch.uint8)


def _unpack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return the booleans of `_pack_bits`."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), bitorder="little").view(np.bool_))
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return ((bits[:, None] >> shifts) & 1).view(-1).to(torch.bool)
