"""The row of a micro-batch that has each prompt once, followed by its responses.

Shapes: ``B`` samples of ``T`` padded positions; ``W`` <= ``T`` predicting positions; ``N`` tokens of the row; ``K``
valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import EMPTY_ROW, NO_PROMPT
from tandem.trainer.micro_batches import TokenRow, move_to_device


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
    owner_B = _owners(prompt_B, last_B > 0)
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


def _owners(prompt_B: NDArray[np.int64], counts_B: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each sample the first one of the same prompt with valid tokens; itself if there is none."""
    prompts = prompt_B.tolist()
    owners = dict[int, int]()
    for row in np.flatnonzero(counts_B).tolist():
        owners.setdefault(prompts[row], row)
    return np.array([*map(owners.get, prompts, range(len(prompts)))], dtype=np.int64)
