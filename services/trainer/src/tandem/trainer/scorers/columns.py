"""The columns that models fill with their scores of a rank's shard: a reference, values, a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.config.schema.columns import ColumnDeclaration, Model
from tandem.trainer.batching.shard import BatchShard, RankBatch, unpad_into
from tandem.trainer.micro_batches import Columns, MicroBatch
from tandem.trainer.scores import Scores

Filled = dict[ColumnDeclaration, NDArray[Any]]
"""Columns for the tokens of a shard."""


def filled_by(batch: RankBatch, model: Model, size: int | None) -> Filled:
    """Return the columns with a model's scores of its shard's valid tokens; zeros elsewhere."""
    shard = batch.shards[model]
    columns = {column: _nothing(batch, column, shard) for column in batch.read if column.model == model}
    for number in range(batch.config.num_of(model)):
        for micro_batch, scores_BT in scored_by(batch, model, size, number=number):
            for column, values_T in columns.items():
                unpad_into(_part_of(batch, values_T, number), scores_BT[column.number], shard.samples, micro_batch.rows)
    return columns


def _part_of(batch: RankBatch, values_T: NDArray[Any], number: int) -> NDArray[Any]:
    """Return the place of one model's numbers in a column that has those of several, one after the other."""
    num_joint = len(batch.config.joint_teachers)
    if num_joint < 2:
        return values_T
    width = values_T.shape[1] // num_joint
    return values_T[:, number * width : (number + 1) * width]


def score_without_masks(batch: RankBatch, size: int | None) -> NDArray[np.float32]:
    """Return the policy's log-probabilities of its shard's valid tokens without sampling masks; zeros elsewhere.

    A divergence from a model without masks is of these: with masks on one side, equal models would differ.
    """
    shard = batch.shards["policy"]
    values_T = np.zeros(len(shard.samples.token_ids_T), dtype=np.float32)
    laid_out = shard.laid_out(shard.scoring(batch.global_batches, size), batch.backend.device, None)
    micro_batches = [msgspec.structs.replace(each, masks=None) for each in laid_out]
    for micro_batch, scores_BT in zip(micro_batches, batch.backend.scores(micro_batches, "policy", 0), strict=True):
        unpad_into(values_T, scores_BT[0], shard.samples, micro_batch.rows)
    return values_T


def _nothing(batch: RankBatch, column: ColumnDeclaration, shard: BatchShard) -> NDArray[Any]:
    rows = () if column.num_each is None else (column.num_each(batch.config),)
    return np.zeros((len(shard.samples.token_ids_T), *rows), dtype=column.dtype)


def scored_by(
    batch: RankBatch, model: Model, size: int | None = None, columns: Columns | None = None, number: int = 0
) -> list[tuple[MicroBatch, Scores]]:
    """Return all micro-batches of this rank, each with a model's scores.

    `number` selects one of several models of the same name. The batch has the sequences that belong to it, or if the
    models are joint teachers, all.
    """
    batches: Sequence[Sequence[int]] = batch.global_batches
    if model == "teacher" and batch.config.has_routed_teachers:
        is_its_S = batch.table.columns[f"{model}_S"] == number
        batches = [[row for row in rows if is_its_S[row]] for rows in batches]
    if not any(batches):
        return []
    shard = batch.shards[model]
    micro_batches = shard.laid_out(shard.scoring(batches, size), batch.backend.device, columns)
    return list(zip(micro_batches, batch.backend.scores(micro_batches, model, number), strict=True))
