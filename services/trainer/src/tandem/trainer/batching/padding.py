"""Padding: sequences laid out as a micro-batch, on the right to one width.

Shapes: ``S`` sequences of the batch, ``T`` tokens of it. Within the micro-batch ``B`` rows and ``T`` padded positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tandem.samples.assignment import EMPTY_ROW
from tandem.samples.batch import Batch
from tandem.samples.images.families import ImageSettings
from tandem.samples.routed_experts import COLUMN, FILL, RoutedExperts
from tandem.trainer.batching.images import row_images
from tandem.trainer.batching.packing import pack_row
from tandem.trainer.batching.shared_prompts import shared_row
from tandem.trainer.micro_batches import Columns, MicroBatch


def pad(
    batch: Batch,
    rows: Sequence[int],
    *,
    divisible_by: int,
    device: torch.device,
    shares_prompts: bool = False,
    row_divisible_by: int | None = None,
    columns: Columns | None = None,
    experts: RoutedExperts | None = None,
    image_settings: ImageSettings | None = None,
) -> MicroBatch:
    """Lay the given sequences out as a micro-batch, with a width that is a multiple of `divisible_by`.

    Args:
        batch: batch with the sequences.
        rows: rows of the batch; `EMPTY_ROW` for none.
        divisible_by: divisor of the width, and of the segments of a packed row.
        device: device of the result.
        shares_prompts: whether to add the row that holds each prompt once, if any two sequences share one.
        row_divisible_by: divisor of the length of the packed row, which is added if this is given.
        columns: loss inputs for each of the batch's tokens; None for scoring only.
        experts: description of the experts that the batch's tokens went to; None without replay.
        image_settings: the model's settings for images; None if it does not see.

    """
    rows_B = np.array(rows, dtype=np.int64)
    lengths_B = np.append(batch.lengths_S.astype(np.int64), 0)[rows_B]  # `EMPTY_ROW` is the last
    width = -(-max(1, int(lengths_B.max())) // divisible_by) * divisible_by
    filled_BT = np.arange(width)[None, :] < lengths_B[:, None]
    sources = (batch.offsets()[rows_B, None] + np.arange(width)[None, :])[filled_BT]

    def padded(values_T: NDArray[Any], dtype: DTypeLike, fill: float = 0) -> NDArray[Any]:
        values_BT = np.full((*filled_BT.shape, *values_T.shape[1:]), fill, dtype=dtype)
        values_BT[filled_BT] = values_T[sources]
        return values_BT

    def moved(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    token_ids_BT = padded(batch.token_ids_T, np.int64)
    valid_BT = padded(batch.valid(), np.bool_)
    routed_BTX = None
    if experts is not None and COLUMN in batch.columns:  # an empty shard has no columns
        routed_BTX = padded(batch.columns[COLUMN], np.uint8, fill=FILL)
    row = None
    if row_divisible_by is not None:
        divisors = {"divisible_by": divisible_by, "row_divisible_by": row_divisible_by}
        row = pack_row(token_ids_BT, lengths_B, valid_BT, **divisors, device=device)
    elif shares_prompts:
        row = shared_row(batch, rows, token_ids_BT, valid_BT, routed_BTX, divisible_by=divisible_by, device=device)
    return MicroBatch(
        rows=tuple(rows),
        lengths_B=moved(lengths_B),
        token_ids_BT=moved(token_ids_BT),
        attention_mask_BT=moved(filled_BT),
        loss_mask_BT=moved(valid_BT),
        columns={
            column.name: moved(padded(values_T, column.dtype, column.fill))
            for column, values_T in (columns or {}).items()
        },
        row=row,
        routed_experts_BTLK=None
        if routed_BTX is None or experts is None
        else moved(
            experts.decode(routed_BTX.reshape(-1, experts.num_bytes)).reshape(*filled_BT.shape, -1, experts.top_k)
        ),
        images=None
        if image_settings is None
        else row_images(batch, rows, token_ids_BT, lengths_B, row, image_settings, device),
    )


def unpad_into(values_T: NDArray[Any], values_BT: torch.Tensor, batch: Batch, rows: Sequence[int]) -> None:
    """Write a micro-batch's padded values back to the positions of their tokens in the ragged batch."""
    ends_S = np.cumsum(batch.lengths_S, dtype=np.int64)
    padded = values_BT.detach().cpu().numpy()
    for values, row in zip(padded, rows, strict=True):
        if row != EMPTY_ROW:
            length = int(batch.lengths_S[row])
            values_T[ends_S[row] - length : ends_S[row]] = values[:length]
