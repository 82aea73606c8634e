"""Micro-batches of a number of tokens, by bin packing; rows that have each prompt once.

Each algorithm of bin packing takes lengths and a capacity that none of them exceeds, and returns bins of indices into
the lengths. All are deterministic, so that every rank finds the same bins.

Shapes: ``U`` units of ``R`` sequences. Within a micro-batch ``B`` sequences of ``T`` padded positions, ``V`` of them
tokens; ``W`` <= ``T`` predicting positions; ``N`` tokens of the model's row; ``K`` valid tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.config.schema import PackingAlgorithm
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import EMPTY_ROW, NO_PROMPT
from tandem.trainer.micro_batches import Groups, TokenRow, move_to_device


def shared_row(
    batch: SampleBatch,
    rows: Sequence[int],
    token_ids_BT: NDArray[np.int64],
    valid_BT: NDArray[np.bool_],
    routed_BTX: NDArray[np.uint8] | None,
    *,
    divisible_by: int,
    device: torch.device,
) -> TokenRow | None:
    """Return the row that holds each prompt once; None if there are as many prompts as sequences.

    `routed_BTX` has the experts of each token. A prompt with tokens at other experts is a different prompt.
    """
    prompt_B, lengths_B = prompts_of(batch, rows)
    if routed_BTX is not None:
        prompt_B = _tell_apart(prompt_B, lengths_B, routed_BTX)
    prompts = prompt_B[prompt_B != EMPTY_ROW]
    if len(np.unique(prompts)) == len(prompts):
        return None
    return share_prompts(token_ids_BT, valid_BT, prompt_B, lengths_B, divisible_by=divisible_by, device=device)


def prompts_of(batch: SampleBatch, rows: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a number for the prompt of each of these sequences, equal for equal prompts, and the prompt's length."""
    rows_B = np.array(rows, dtype=np.int64)
    # `EMPTY_ROW` is the last of each.
    prompt_B = np.append(batch.prompt_S.astype(np.int64), EMPTY_ROW)[rows_B]
    # Nothing predicts the very first token, so it belongs to the prompt whatever the response is.
    lengths_B = np.append(np.maximum(1, batch.prompt_lengths_S.astype(np.int64)), 0)[rows_B]
    alone = int(batch.prompt_S.max(initial=0)) + 1  # numbers from here on belong to no prompt
    return np.where((prompt_B == NO_PROMPT) & (rows_B != EMPTY_ROW), alone + rows_B, prompt_B), lengths_B


def _tell_apart(
    prompt_B: NDArray[np.int64], lengths_B: NDArray[np.int64], routed_BTX: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Return new numbers of prompts, equal for equal prompts with tokens at the same experts."""
    firsts: dict[tuple[int, bytes], int] = {}
    return np.array(
        [
            EMPTY_ROW if prompt == EMPTY_ROW else firsts.setdefault((prompt, routed_BTX[row, :length].tobytes()), row)
            for row, (prompt, length) in enumerate(zip(prompt_B.tolist(), lengths_B.tolist(), strict=True))
        ],
        dtype=np.int64,
    )


def share_prompts(
    token_ids_BT: NDArray[np.int64],
    valid_BT: NDArray[np.bool_],
    prompt_B: NDArray[np.int64],
    prompt_lengths_B: NDArray[np.int64],
    *,
    divisible_by: int,
    device: torch.device,
) -> TokenRow:
    """Lay padded samples out as one row, with a length that is a multiple of `divisible_by`.

    Rows of equal `prompt_B` begin with the same `prompt_lengths_B` tokens. Tokens after the last one that predicts a
    valid token are left out, and so are samples without valid tokens.
    """
    num_samples, width = valid_BT.shape
    last_B = np.where(valid_BT.any(axis=1), width - 1 - valid_BT[:, ::-1].argmax(axis=1), 0)
    position_W = np.arange(max(1, int(last_B.max())))
    is_used_BW = position_W < last_B[:, None]
    first_of_prompt = dict[int, int]()  # of samples with valid tokens
    for row in np.flatnonzero(last_B).tolist():
        first_of_prompt.setdefault(int(prompt_B[row]), row)
    owner_B = np.array([*map(first_of_prompt.get, prompt_B.tolist(), range(num_samples))], dtype=np.int64)
    is_prompt_BW = position_W < prompt_lengths_B[:, None]
    is_own_BW = is_used_BW & (~is_prompt_BW | (owner_B == np.arange(num_samples))[:, None])

    taken_N = np.flatnonzero(is_own_BW)
    number_BW = (np.cumsum(is_own_BW) - 1).reshape(is_own_BW.shape)
    row_BW = np.where(is_prompt_BW, owner_B[:, None], np.arange(num_samples)[:, None])
    source_BW = np.where(is_used_BW, number_BW[row_BW, position_W], 0)
    position_N = taken_N % len(position_W)
    padding = (0, max(1, -(-len(taken_N) // divisible_by)) * divisible_by - len(taken_N))

    return TokenRow(
        token_ids_1N=move_to_device(
            np.pad(token_ids_BT[:, : len(position_W)].reshape(-1)[taken_N], padding)[None], device
        ),
        position_ids_1N=move_to_device(np.pad(position_N, padding)[None], device),
        source_BW=move_to_device(source_BW, device),
        taken_N=move_to_device(np.pad(taken_N, padding), device),
        predictor_K=move_to_device(source_BW[:, : width - 1][valid_BT[:, 1 : len(position_W) + 1]], device),
        source_N=move_to_device(
            np.pad(taken_N // len(position_W) * width + position_N, padding, constant_values=-1), device
        ),
    )


def pack(lengths: Sequence[int], capacity: int, algorithm: PackingAlgorithm) -> list[list[int]]:
    """Put every index into one bin, so that no bin's lengths add up to more than `capacity`.

    With ``OPT`` the least number of bins of any packing:

    - ``concatenative`` takes the sequences in order and opens a bin when one does not fit: at most 2 OPT - 1.
    - ``first_fit_shuffle`` puts each into the first bin with room, in a random but fixed order: at most 1.7 OPT (Dosa
      and Sgall 2013).
    - ``first_fit_decreasing`` does that in descending order: at most 11/9 OPT + 6/9 (Dosa 2007).
    - ``modified_first_fit_decreasing`` first pairs large and medium sequences: at most 71/60 OPT + 31/6 (Johnson
      and Garey 1985, "A 71/60 theorem for bin packing").
    """
    assert all(length <= capacity for length in lengths), "the configuration's checks bound the lengths"
    match algorithm:
        case "concatenative":
            return _concatenative(lengths, capacity)
        case "first_fit_shuffle":
            return _first_fit(np.random.default_rng(0).permutation(len(lengths)).tolist(), lengths, capacity)
        case "first_fit_decreasing":
            return _first_fit(_descending(lengths), lengths, capacity)
        case "modified_first_fit_decreasing":
            return _modified_first_fit_decreasing(lengths, capacity)


def _descending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _concatenative(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return bins


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room_B = np.full(len(order), capacity, dtype=np.int64)  # one bin each, if all should need their own
    for index in order:
        first = int((room_B >= lengths[index]).argmax())
        if first == len(bins):
            bins.append([])
        bins[first].append(index)
        room_B[first] -= lengths[index]
    return bins


class _Ascending:
    """Items by length, which gives out the shortest, or the longest that fits."""

    def __init__(self, items: Sequence[int], lengths: Sequence[int]) -> None:
        self.items = sorted((lengths[index], index) for index in items)

    def shortest(self, count: int = 1) -> int | None:
        """Return the sum of the shortest `count` items; None if there are fewer."""
        return sum(length for length, _ in self.items[:count]) if len(self.items) >= count else None

    def take_shortest(self) -> tuple[int, int]:
        return self.items.pop(0)

    def take_longest(self, room: int) -> tuple[int, int]:
        """Take the longest item that is no longer than `room`. There must be one."""
        return self.items.pop(bisect.bisect_right(self.items, room, key=lambda item: item[0]) - 1)


def _modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Give each item over half the capacity a bin, filled with chosen others. Pack the rest by decreasing first fit."""
    classes: list[list[int]] = [[], [], [], []]  # large, medium (over 1/3), small (over 1/6), tiny
    for index in _descending(lengths):
        classes[sum(lengths[index] * parts <= capacity for parts in (2, 3, 6))].append(index)
    bins = [[index] for index in classes[0]]
    rooms = [capacity - lengths[index] for index in classes[0]]

    def put(number: int, item: tuple[int, int]) -> None:
        rooms[number] -= item[0]
        bins[number].append(item[1])

    medium, small = (_Ascending(classes[number], lengths) for number in (1, 2))
    for number, room in enumerate(rooms):
        shortest = medium.shortest()
        if shortest is not None and shortest <= room:
            put(number, medium.take_longest(room))
    for number in reversed(range(len(bins))):
        two = small.shortest(2)
        if len(bins[number]) == 1 and two is not None and two <= rooms[number]:
            put(number, small.take_shortest())
            put(number, small.take_longest(rooms[number]))
    remaining = _Ascending([item[1] for item in (*medium.items, *small.items)] + classes[3], lengths)
    for number in range(len(bins)):
        while (shortest := remaining.shortest()) is not None and shortest <= rooms[number]:
            put(number, remaining.take_longest(rooms[number]))
    unplaced = sorted((index for _, index in remaining.items), key=lambda index: (-lengths[index], index))
    return bins + _first_fit(unplaced, lengths, capacity)


def packed_groups(
    units: list[int], lengths_UR: NDArray[np.int64], num_tokens: int, divisible_by: int, algorithm: PackingAlgorithm
) -> Groups:
    """Put units together that fit into one row, each sequence's segment a multiple of `divisible_by`."""
    segments_UR = -(-lengths_UR[units] // divisible_by) * divisible_by
    lengths = segments_UR.sum(axis=1).tolist()
    # The longest must still fit after rounding up.
    packed = pack(lengths, max(num_tokens, *lengths, 0), algorithm)
    return [tuple(units[index] for index in group) for group in packed]


def padded_groups(units: Sequence[int], lengths_UR: NDArray[np.int64], num_tokens: int, divisible_by: int) -> Groups:
    """Put similar lengths together, the longest first: as many units as fit at the width of the first."""
    widest_U = lengths_UR.max(axis=1)
    ordered = sorted(units, key=lambda unit: (-int(widest_U[unit]), unit))
    groups: Groups = []
    while ordered:
        width = -(-int(widest_U[ordered[0]]) // divisible_by) * divisible_by
        size = max(1, num_tokens // (max(1, width) * lengths_UR.shape[1]))
        groups.append(tuple(ordered[:size]))
        ordered = ordered[size:]
    return groups


def pack_row(
    token_ids_BT: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    valid_BT: NDArray[np.bool_],
    *,
    divisible_by: int,
    row_divisible_by: int,
    filler: int = 0,
    device: torch.device,
) -> TokenRow:
    """Lay the sequences end to end. The length of each segment, and of the row, is a multiple of its divisor.

    A segment of padding consists of the token `filler`. Sequences of length zero have no segment. An empty row is one
    segment of padding.
    """
    segments_B = -(-lengths_B // divisible_by) * divisible_by
    firsts_B = np.cumsum(segments_B) - segments_B
    used = int(segments_B.sum())
    row_multiple = np.lcm(divisible_by, row_divisible_by)
    num_tokens = int(max(1, -(-used // row_multiple)) * row_multiple)
    lengths = [int(length) for length in segments_B if length]
    if num_tokens > used:
        lengths.append(num_tokens - used)

    row_K, position_K = np.nonzero(valid_BT)
    token_ids_N = np.zeros(num_tokens, dtype=np.int64)
    token_ids_N[used:] = filler
    filled_BT = np.arange(token_ids_BT.shape[1]) < lengths_B[:, None]
    place_V = (firsts_B[:, None] + np.arange(token_ids_BT.shape[1]))[filled_BT]
    token_ids_N[place_V] = token_ids_BT[filled_BT]
    source_N = np.full(num_tokens, -1, dtype=np.int64)
    source_N[place_V] = np.flatnonzero(filled_BT)

    return TokenRow(
        token_ids_1N=move_to_device(token_ids_N[None], device),
        position_ids_1N=move_to_device(np.concatenate([np.arange(length) for length in lengths])[None], device),
        lengths=tuple(lengths),
        predictor_K=move_to_device(firsts_B[row_K] + position_K - 1, device),
        source_N=move_to_device(source_N, device),
    )
