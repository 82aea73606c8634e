"""Packed rows: sequences end to end, as a model computes with them where nothing is padded.

Attention, the only layer where tokens meet, is told where each sequence ends, so none sees another.

Shapes: ``B`` sequences of a micro-batch and ``T`` padded positions, ``V`` of them tokens; ``N`` tokens of the row;
``K`` counted tokens.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray


class PackedRow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch as one row of segments, each a sequence and its padding."""

    token_ids_1N: torch.Tensor
    """int64; zero in the padding."""
    position_ids_1N: torch.Tensor
    """int64; each segment counts from 0."""
    lengths: tuple[int, ...]
    """Of the segments, padding included: they sum to ``N``. The last may be padding alone."""
    predictor_K: torch.Tensor
    """int64; the row's token that predicts each counted token, in the order of the loss mask."""
    source_N: torch.Tensor
    """int64; which of the ``B * T`` positions each token of the row is; -1 in the padding."""


def pack_row(
    token_ids_BT: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    counted_BT: NDArray[np.bool_],
    *,
    divisible_by: int,
    row_divisible_by: int,
    device: torch.device,
) -> PackedRow:
    """Lay the sequences end to end, every segment a multiple of `divisible_by` long, and the row of both.

    Sequences of length zero have no segment. A row of nothing at all is one segment of padding.
    """
    segments_B = -(-lengths_B // divisible_by) * divisible_by
    firsts_B = np.cumsum(segments_B) - segments_B
    used = int(segments_B.sum())
    whole = np.lcm(divisible_by, row_divisible_by)
    num_tokens = int(max(1, -(-used // whole)) * whole)
    lengths = [int(length) for length in segments_B if length]
    if num_tokens > used:
        lengths.append(num_tokens - used)

    row_K, position_K = np.nonzero(counted_BT)
    token_ids_N = np.zeros(num_tokens, dtype=np.int64)
    valid_BT = np.arange(token_ids_BT.shape[1]) < lengths_B[:, None]
    place_V = (firsts_B[:, None] + np.arange(token_ids_BT.shape[1]))[valid_BT]
    token_ids_N[place_V] = token_ids_BT[valid_BT]
    source_N = np.full(num_tokens, -1, dtype=np.int64)
    source_N[place_V] = np.flatnonzero(valid_BT)

    def moved(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return PackedRow(
        token_ids_1N=moved(token_ids_N[None]),
        position_ids_1N=moved(np.concatenate([np.arange(length) for length in lengths])[None]),
        lengths=tuple(lengths),
        predictor_K=moved(firsts_B[row_K] + position_K - 1),
        source_N=moved(source_N),
    )
