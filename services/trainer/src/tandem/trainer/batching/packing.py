"""Micro-batches of a number of tokens: packed into one row each, or like lengths padded together.

Shapes: ``U`` units of ``R`` sequences. Within a micro-batch ``B`` sequences of ``T`` padded positions, ``V`` of them
tokens; ``N`` tokens of the model's row; ``K`` valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.config.schema import PackingAlgorithm
from tandem.trainer.batching import bins
from tandem.trainer.micro_batches import Groups, TokenRow, move_to_device


def packed_groups(
    units: list[int], lengths_UR: NDArray[np.int64], num_tokens: int, divisible_by: int, algorithm: PackingAlgorithm
) -> Groups:
    """Put units together that fit into one row, each sequence's segment a multiple of `divisible_by`."""
    segments_UR = -(-lengths_UR[units] // divisible_by) * divisible_by
    lengths = segments_UR.sum(axis=1).tolist()
    # The longest must still fit after rounding up.
    packed = bins.pack(lengths, max(num_tokens, *lengths, 0), algorithm)
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
