"""From a ragged share of a batch to padded micro-batches.

Shapes: ``S`` sequences and ``T`` tokens of the ragged share; within a micro-batch ``B`` rows and ``T`` padded
positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tandem.common.assignment import EMPTY_ROW, Ints, by_prompt
from tandem.common.batch import Batch
from tandem.common.columns import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    REWARDS,
    TEACHER_TOPK_INDICES,
    TEACHER_TOPK_LOGITS,
    VALUES,
    Column,
)
from tandem.common.routed_experts import COLUMN, FILL, RoutedExperts
from tandem.trainer.packed import PackedRow, pack_row
from tandem.trainer.sharing import Prompts, SharedPrompts, share_prompts

Columns = Mapping[Column, NDArray[Any]]
"""What a loss reads of each token of a ragged share, ``[T]`` or ``[T, N]``."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Some sequences of a batch, padded on the right to one width: what one forward and backward pass takes.

    Because the padding comes last, a causal model needs no attention mask for the valid positions to be right.
    """

    rows: tuple[int, ...]
    """Which sequence of this rank's share each row is; `EMPTY_ROW` for none."""
    lengths_B: torch.Tensor
    """int64."""
    token_ids_BT: torch.Tensor
    """int64; zero in the padding."""
    attention_mask_BT: torch.Tensor
    """True where there is a token."""
    loss_mask_BT: torch.Tensor
    """True where the token counts in the loss; never at position 0, which nothing predicts."""
    columns: Mapping[str, torch.Tensor] = {}
    """What the loss reads of each token, by the name of its declaration (`tandem.common.columns`): ``[B, T]``, or
    ``[B, T, N]`` where it is several numbers."""
    shared_prompts: SharedPrompts | None = None
    """The same samples as one row that holds each prompt once, for the model; None where no two share a prompt."""
    packed: PackedRow | None = None
    """The same sequences end to end in one row, for the model; None where it takes the padded rows."""
    routed_experts_BTLK: torch.Tensor | None = None
    """int16; where the engine sent each token in each layer, -1 where that is not known; None where nothing is replayed
    (`tandem.common.routed_experts`)."""

    @property
    def generation_logprobs_BT(self) -> torch.Tensor:
        """What the engine reported."""
        return self._read(GENERATION_LOGPROBS)

    @property
    def advantages_BT(self) -> torch.Tensor:
        """Those of the tokens' samples, or their own."""
        return self._read(ADVANTAGES)

    @property
    def previous_logprobs_BT(self) -> torch.Tensor | None:
        """Under the policy before the first optimizer step on this rollout batch.

        None where that is the policy in training itself.
        """
        return self.columns.get(PREVIOUS_LOGPROBS.name)

    @property
    def reference_logprobs_BT(self) -> torch.Tensor | None:
        """Under the reference model; None where the loss does not read it."""
        return self.columns.get(REFERENCE_LOGPROBS.name)

    @property
    def rewards_BT(self) -> torch.Tensor:
        """Those of the tokens' sequences: of samples, or what a data set says."""
        return self._read(REWARDS)

    @property
    def is_positive_BT(self) -> torch.Tensor | None:
        """True where the sample's reward is above zero; None where the loss does not read rewards."""
        rewards_BT = self.columns.get(REWARDS.name)
        return None if rewards_BT is None else rewards_BT > 0

    @property
    def values_BT(self) -> torch.Tensor:
        """What the value model expected before the first optimizer step on this rollout batch."""
        return self._read(VALUES)

    @property
    def returns_BT(self) -> torch.Tensor:
        """What came of it."""
        return self._read(RETURNS)

    @property
    def teacher_topk_logits_BTN(self) -> torch.Tensor:
        """Of the teacher's likeliest tokens in the place of each."""
        return self._read(TEACHER_TOPK_LOGITS)

    @property
    def others_BTN(self) -> torch.Tensor | None:
        """Tokens that the policy is to score, too, in the place of each: the teacher's likeliest; None where the loss
        reads none."""
        return self.columns.get(TEACHER_TOPK_INDICES.name)

    def _read(self, column: Column) -> torch.Tensor:
        if column.name not in self.columns:
            listed = ", ".join(self.columns) or "none"
            raise LookupError(f"no column {column.name} is declared of the loss of this algorithm, but {listed}")
        return self.columns[column.name]


def micro_batches_of(
    rows: Sequence[int],
    lengths_S: Sequence[int] | Ints,
    size: int,
    prompt_S: Ints | None = None,
) -> list[tuple[int, ...]]:
    """Group a rank's sequences into micro-batches of at most `size`, like lengths together so that little is padded.

    Sequences of equal `prompt_S` lie side by side, so a `size` that is a multiple of the samples of a prompt splits no
    group. The number of micro-batches depends on the number of rows alone: equal shares give equal numbers of passes.
    """
    ordered = [row for run in by_prompt([row for row in rows if row != EMPTY_ROW], lengths_S, prompt_S) for row in run]
    ordered += [EMPTY_ROW] * (len(rows) - len(ordered))
    return [tuple(ordered[first : first + size]) for first in range(0, len(ordered), size)]


def pad(
    batch: Batch,
    rows: Sequence[int],
    *,
    divisible_by: int,
    device: torch.device,
    prompts: Prompts | None = None,
    row_divisible_by: int | None = None,
    columns: Columns | None = None,
    experts: RoutedExperts | None = None,
) -> MicroBatch:
    """Lay the given sequences out as a micro-batch whose width is a multiple of `divisible_by`.

    With `prompts`, and where two of the sequences share one, the row that holds each prompt once comes with it. With
    `row_divisible_by`, the packed row comes with it: of such a length, its segments multiples of `divisible_by`.
    `columns` are what the loss reads of each of the batch's tokens; there are none where it is scored alone. With
    `experts`, what the batch says of where its tokens went comes with it.
    """
    lengths_B = np.array([0 if row == EMPTY_ROW else batch.lengths_S[row] for row in rows], dtype=np.int64)
    ends_S = np.cumsum(batch.lengths_S, dtype=np.int64)
    firsts_B = np.array([0 if row == EMPTY_ROW else ends_S[row] - batch.lengths_S[row] for row in rows], dtype=np.int64)
    width = -(-max(1, int(lengths_B.max())) // divisible_by) * divisible_by
    valid_BT = np.arange(width)[None, :] < lengths_B[:, None]
    sources = (firsts_B[:, None] + np.arange(width)[None, :])[valid_BT]

    def padded(values_T: NDArray[Any], dtype: DTypeLike, fill: float = 0) -> NDArray[Any]:
        values_BT = np.full((*valid_BT.shape, *values_T.shape[1:]), fill, dtype=dtype)
        values_BT[valid_BT] = values_T[sources]
        return values_BT

    def moved(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    token_ids_BT = padded(batch.token_ids_T, np.int64)
    counted_BT = padded(batch.counted(), np.bool_)
    routed_BTX = None
    if experts is not None and COLUMN in batch.columns:  # a share of no sequences has no columns
        routed_BTX = padded(batch.columns[COLUMN], np.uint8, fill=FILL)
    return MicroBatch(
        rows=tuple(rows),
        lengths_B=moved(lengths_B),
        token_ids_BT=moved(token_ids_BT),
        attention_mask_BT=moved(valid_BT),
        loss_mask_BT=moved(counted_BT),
        columns={
            column.name: moved(padded(values_T, column.dtype, column.fill))
            for column, values_T in (columns or {}).items()
        },
        shared_prompts=None
        if prompts is None
        else _shared(prompts, rows, token_ids_BT, counted_BT, routed_BTX, divisible_by=divisible_by, device=device),
        packed=None
        if row_divisible_by is None
        else pack_row(
            token_ids_BT,
            lengths_B,
            counted_BT,
            divisible_by=divisible_by,
            row_divisible_by=row_divisible_by,
            device=device,
        ),
        routed_experts_BTLK=None
        if routed_BTX is None or experts is None
        else moved(
            experts.decode(routed_BTX.reshape(-1, experts.num_bytes)).reshape(*valid_BT.shape, -1, experts.top_k)
        ),
    )


def _shared(
    prompts: Prompts,
    rows: Sequence[int],
    token_ids_BT: NDArray[np.int64],
    counted_BT: NDArray[np.bool_],
    routed_BTX: NDArray[np.uint8] | None,
    *,
    divisible_by: int,
    device: torch.device,
) -> SharedPrompts | None:
    """Return the row that holds each prompt once; None where there are as many prompts as sequences.

    With `routed_BTX`, what sequences say of their experts, a prompt whose tokens went elsewhere is another one.
    """
    prompt_B = np.array([EMPTY_ROW if row == EMPTY_ROW else prompts.prompt_S[row] for row in rows], dtype=np.int64)
    lengths_B = np.array([0 if row == EMPTY_ROW else prompts.lengths_S[row] for row in rows], dtype=np.int64)
    if routed_BTX is not None:
        prompt_B = _told_apart(prompt_B, lengths_B, routed_BTX)
    held = prompt_B[prompt_B != EMPTY_ROW]
    if len(np.unique(held)) == len(held):
        return None
    return share_prompts(token_ids_BT, counted_BT, prompt_B, lengths_B, divisible_by=divisible_by, device=device)


def _told_apart(
    prompt_B: NDArray[np.int64], lengths_B: NDArray[np.int64], routed_BTX: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Return other numbers of prompts, equal where the prompt is and its tokens went to the same experts."""
    firsts: dict[tuple[int, bytes], int] = {}
    return np.array(
        [
            EMPTY_ROW if prompt == EMPTY_ROW else firsts.setdefault((prompt, routed_BTX[row, :length].tobytes()), row)
            for row, (prompt, length) in enumerate(zip(prompt_B.tolist(), lengths_B.tolist(), strict=True))
        ],
        dtype=np.int64,
    )


def unpad_into(values_T: NDArray[Any], values_BT: torch.Tensor, batch: Batch, rows: Sequence[int]) -> None:
    """Write a micro-batch's padded values back to where their tokens lie in the ragged batch."""
    ends_S = np.cumsum(batch.lengths_S, dtype=np.int64)
    padded = values_BT.detach().cpu().numpy()
    for values, row in zip(padded, rows, strict=True):
        if row != EMPTY_ROW:
            length = int(batch.lengths_S[row])
            values_T[ends_S[row] - length : ends_S[row]] = values[:length]
