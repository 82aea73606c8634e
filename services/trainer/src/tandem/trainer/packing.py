"""From one ragged batch to padded micro-batches: who trains on what, and in which shape.

Everything here is a pure function of its arguments, so every rank works out its own share of a batch, and the others'
sizes, without asking anyone.

Shapes: ``S`` sequences and ``T`` tokens of the whole ragged batch; within a micro-batch ``B`` rows and ``T`` padded
positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.batch import Float32s, TrainingBatch

EMPTY_ROW = -1
"""Stands for a row that holds no sequence: it evens out the ranks' shares and counts nowhere."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Some sequences of a batch, padded on the right to one width: what one forward and backward pass takes.

    Because the padding comes last, a causal model needs no attention mask for the valid positions to be right.
    """

    rows: tuple[int, ...]
    """Which sequence of the batch each row is; `EMPTY_ROW` for none."""
    lengths_B: torch.Tensor
    """int64."""
    token_ids_BT: torch.Tensor
    """int64; zero in the padding."""
    attention_mask_BT: torch.Tensor
    """True where there is a token."""
    loss_mask_BT: torch.Tensor
    """True where the token counts in the loss; never at position 0, which nothing predicts."""
    generation_logprobs_BT: torch.Tensor
    """float32; what the engine reported."""
    advantages_B: torch.Tensor
    """float32."""
    previous_logprobs_BT: torch.Tensor | None = None
    """float32; under the policy before the first optimizer step on this rollout batch. None where that is the policy
    in training itself."""
    reference_logprobs_BT: torch.Tensor | None = None
    """float32; under the reference model. None where the loss does not read it."""


def counted_tokens(batch: TrainingBatch) -> NDArray[np.bool_]:
    """Return the loss mask ``[T]`` without the first token of each sequence, which nothing predicts."""
    mask_T = batch.loss_mask_T.copy()
    firsts = np.cumsum(batch.lengths_S, dtype=np.int64) - batch.lengths_S
    mask_T[firsts[batch.lengths_S > 0]] = False
    return mask_T


def counts_of_sequences(batch: TrainingBatch) -> NDArray[np.int64]:
    """Return the number of counted tokens of each sequence, ``[S]``."""
    cumulative = np.concatenate([[0], np.cumsum(counted_tokens(batch), dtype=np.int64)])
    ends = np.cumsum(batch.lengths_S, dtype=np.int64)
    return np.asarray(cumulative[ends] - cumulative[ends - batch.lengths_S], dtype=np.int64)


def global_batches(num_sequences: int, size: int) -> list[range]:
    """Cut a rollout batch into the consecutive sequences of each optimizer step; the last may be smaller."""
    return [range(first, min(first + size, num_sequences)) for first in range(0, num_sequences, size)]


def deal(rows: Sequence[int], lengths_S: Sequence[int] | NDArray[np.int32], num_ranks: int) -> list[list[int]]:
    """Deal the sequences of a global batch to the ranks: equal counts, nearly equal tokens.

    The longest go first, one to each rank, back and forth: the rank that got the longest of one round gets the shortest
    of the next. Where the count does not divide, `EMPTY_ROW` fills up.
    """
    by_length = sorted(rows, key=lambda row: (-int(lengths_S[row]), row))
    by_length += [EMPTY_ROW] * (-len(by_length) % num_ranks)
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    for number, first in enumerate(range(0, len(by_length), num_ranks)):
        dealt = by_length[first : first + num_ranks]
        for hand, row in zip(hands, dealt if number % 2 == 0 else reversed(dealt), strict=True):
            hand.append(row)
    return hands


def micro_batches_of(
    rows: Sequence[int], lengths_S: Sequence[int] | NDArray[np.int32], size: int
) -> list[tuple[int, ...]]:
    """Group a rank's sequences into micro-batches of at most `size`, like lengths together so that little is padded.

    The number of micro-batches depends on the number of rows alone: equal hands give equal numbers of passes.
    """
    by_length = sorted(rows, key=lambda row: (0 if row == EMPTY_ROW else -int(lengths_S[row]), row))
    return [tuple(by_length[first : first + size]) for first in range(0, len(by_length), size)]


def pad(
    batch: TrainingBatch,
    rows: Sequence[int],
    *,
    divisible_by: int,
    device: torch.device,
    previous_logprobs_T: Float32s | None = None,
    reference_logprobs_T: Float32s | None = None,
) -> MicroBatch:
    """Lay the given sequences out as a micro-batch whose width is a multiple of `divisible_by`."""
    lengths_B = np.array([0 if row == EMPTY_ROW else batch.lengths_S[row] for row in rows], dtype=np.int64)
    ends_S = np.cumsum(batch.lengths_S, dtype=np.int64)
    firsts_B = np.array([0 if row == EMPTY_ROW else ends_S[row] - batch.lengths_S[row] for row in rows], dtype=np.int64)
    width = -(-max(1, int(lengths_B.max())) // divisible_by) * divisible_by
    valid_BT = np.arange(width)[None, :] < lengths_B[:, None]
    sources = (firsts_B[:, None] + np.arange(width)[None, :])[valid_BT]

    def padded(values_T: NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
        values_BT = np.zeros(valid_BT.shape, dtype=dtype)
        values_BT[valid_BT] = values_T[sources]
        return torch.from_numpy(values_BT).to(device)

    advantages_B = np.array([0.0 if row == EMPTY_ROW else batch.advantages_S[row] for row in rows], dtype=np.float32)
    return MicroBatch(
        rows=tuple(rows),
        lengths_B=torch.from_numpy(lengths_B).to(device),
        token_ids_BT=padded(batch.token_ids_T, np.int64),
        attention_mask_BT=torch.from_numpy(valid_BT).to(device),
        loss_mask_BT=padded(counted_tokens(batch), np.bool_),
        generation_logprobs_BT=padded(batch.generation_logprobs_T, np.float32),
        advantages_B=torch.from_numpy(advantages_B).to(device),
        previous_logprobs_BT=None if previous_logprobs_T is None else padded(previous_logprobs_T, np.float32),
        reference_logprobs_BT=None if reference_logprobs_T is None else padded(reference_logprobs_T, np.float32),
    )


def unpad_into(values_T: Float32s, values_BT: torch.Tensor, batch: TrainingBatch, rows: Sequence[int]) -> None:
    """Write a micro-batch's padded values back to where their tokens lie in the ragged batch."""
    ends_S = np.cumsum(batch.lengths_S, dtype=np.int64)
    padded = values_BT.detach().float().cpu().numpy()
    for values, row in zip(padded, rows, strict=True):
        if row != EMPTY_ROW:
            length = int(batch.lengths_S[row])
            values_T[ends_S[row] - length : ends_S[row]] = values[:length]
