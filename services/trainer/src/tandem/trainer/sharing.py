"""Prompt sharing: prompts that are computed once for all of their responses.

The samples of a prompt group begin with the same tokens. A model whose only layer where tokens meet is attention may be
fed each prompt once, its responses behind it, all of a micro-batch in one row without padding; attention alone sees
every sample in full. Positions count within a sample, so a long row needs no more of them than its longest sample.
Log-probabilities, and gradients, are those of the samples one by one.

Shapes: ``B`` samples of a micro-batch and ``T`` padded positions; ``N`` tokens of the row; ``W`` <= ``T`` positions
that predict something; ``K`` counted tokens.
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.assignment import NO_PROMPT
from tandem.common.batch import Batch


class Prompts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Which sequences of a ragged batch begin with the same prompt."""

    prompt_S: NDArray[np.int64]
    """Equal where the prompt is."""
    lengths_S: NDArray[np.int64]
    """Tokens of each prompt, at least 1."""

    @classmethod
    def of(cls, table: Batch) -> Self:
        """Return those of a batch's sequences."""
        prompt_S = table.prompt_S.astype(np.int64)
        alone_S = len(table) + np.arange(len(table)) + prompt_S.max(initial=0)  # numbers that no prompt has
        return cls(
            prompt_S=np.where(prompt_S == NO_PROMPT, alone_S, prompt_S),
            # Nothing predicts the very first token, so it belongs to the prompt whatever the response is.
            lengths_S=np.maximum(table.prompt_lengths_S, 1).astype(np.int64),
        )


class SharedPrompts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch as one row of tokens, and the way between that row and its padded samples."""

    token_ids_1N: torch.Tensor
    """int64."""
    position_ids_1N: torch.Tensor
    """int64; within each token's own sample."""
    source_BW: torch.Tensor
    """int64; the row's token at each position of each sample; 0 in the padding, where causal attention hides it."""
    taken_N: torch.Tensor
    """int64; which of the ``B * W`` positions each token of the row takes what it attended to from."""
    predictor_K: torch.Tensor
    """int64; the row's token that predicts each counted token, in the order of the loss mask."""
    source_N: torch.Tensor
    """int64; which of the ``B * T`` positions each token of the row is; -1 in the padding."""


def share_prompts(
    token_ids_BT: NDArray[np.int64],
    counted_BT: NDArray[np.bool_],
    prompt_B: NDArray[np.int64],
    prompt_lengths_B: NDArray[np.int64],
    *,
    divisible_by: int,
    device: torch.device,
) -> SharedPrompts:
    """Lay padded samples out as one row, its length a multiple of `divisible_by`.

    Rows of equal `prompt_B` begin with the same `prompt_lengths_B` tokens. What comes after the last token that
    predicts a counted one is left out, and so is a sample where nothing counts.
    """
    num_samples, width = counted_BT.shape
    last_B = np.where(counted_BT.any(axis=1), width - 1 - counted_BT[:, ::-1].argmax(axis=1), 0)
    position_W = np.arange(max(1, int(last_B.max())))
    is_used_BW = position_W < last_B[:, None]
    owner_B = _owners(prompt_B, last_B > 0)
    is_prompt_BW = position_W < prompt_lengths_B[:, None]
    is_own_BW = is_used_BW & (~is_prompt_BW | (owner_B == np.arange(num_samples))[:, None])

    taken_N = np.flatnonzero(is_own_BW)
    number_BW = (np.cumsum(is_own_BW) - 1).reshape(is_own_BW.shape)
    row_BW = np.where(is_prompt_BW, owner_B[:, None], np.arange(num_samples)[:, None])
    source_BW = np.where(is_used_BW, number_BW[row_BW, position_W], 0)
    position_N = taken_N % len(position_W)
    padding = (0, max(1, -(-len(taken_N) // divisible_by)) * divisible_by - len(taken_N))

    def moved(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return SharedPrompts(
        token_ids_1N=moved(np.pad(token_ids_BT[:, : len(position_W)].reshape(-1)[taken_N], padding)[None]),
        position_ids_1N=moved(np.pad(position_N, padding)[None]),
        source_BW=moved(source_BW),
        taken_N=moved(np.pad(taken_N, padding)),
        predictor_K=moved(source_BW[:, : width - 1][counted_BT[:, 1 : len(position_W) + 1]]),
        source_N=moved(np.pad(taken_N // len(position_W) * width + position_N, padding, constant_values=-1)),
    )


def _owners(prompt_B: NDArray[np.int64], counts_B: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return, for each sample, the first one of the same prompt where something counts; itself if there is none."""
    owners: dict[int, int] = {}
    for row, (prompt, counts) in enumerate(zip(prompt_B.tolist(), counts_B.tolist(), strict=True)):
        if counts:
            owners.setdefault(prompt, row)
    return np.array([owners.get(prompt, row) for row, prompt in enumerate(prompt_B.tolist())], dtype=np.int64)
