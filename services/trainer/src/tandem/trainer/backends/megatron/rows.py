"""Micro-batches as Megatron-Core takes them: one row of sequences, of which a rank has its share.

Shapes: ``N`` tokens of the row, ``M`` of them on this context-parallel rank; ``K`` valid tokens of the micro-batch,
    ``L`` of them predicted by a token of this rank; ``B`` and ``T`` as in `MicroBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from tandem.trainer import context, micro_batches, routing
from tandem.trainer.backends.megatron.routing import RoutedSequences


class MegatronRow(msgspec.Struct, frozen=True, eq=False):
    """One forward pass of this rank."""

    batch: micro_batches.MicroBatch | None
    """The micro-batch to score; None for a row that only fills up a schedule."""
    token_ids_1M: torch.Tensor
    position_ids_1M: torch.Tensor
    sequences: RoutedSequences
    """Bounds of the whole row's sequences, with the experts of this rank's tokens."""
    predictor_L: torch.Tensor
    """Tokens of this rank that predict valid ones."""
    valid_L: torch.Tensor
    """Indices of these among the ``K`` valid tokens."""


def rows_of(
    batches: Sequence[micro_batches.MicroBatch], rank: int, size: int, *, round_to: int, equal: bool, divisor: int = 1
) -> list[MegatronRow]:
    """Return the share of each micro-batch for one context-parallel rank.

    Args:
        batches: micro-batches. The lengths of their sequences are multiples of ``2 * size``, unless `size` is 1.
        rank: context-parallel rank of this process.
        size: context-parallel size.
        round_to: divisor of the number of micro-batches in virtual pipelines. Rows without a micro-batch fill up.
        equal: whether all rows must have the same length, by padding.
        divisor: divisor of the length of a whole row, by padding; a multiple of that of a sequence's length.
    """
    packed = [context.as_row(batch) for batch in batches]
    longest = max(sum(row.lengths) for row in packed)
    rows = []
    for batch, row in zip(batches, packed, strict=True):
        num_tokens = longest if equal else sum(row.lengths)
        rows.append(_share(batch, _extended(row, -(-num_tokens // divisor) * divisor), rank, size))
    idle = msgspec.structs.replace(rows[0], batch=None)
    return rows + [idle] * (-len(rows) % round_to)


def _extended(row: micro_batches.TokenRow, num_tokens: int) -> micro_batches.TokenRow:
    """Return a row with a segment of padding behind it."""
    missing = num_tokens - sum(row.lengths)
    if not missing:
        return row
    return micro_batches.TokenRow(
        token_ids_1N=F.pad(row.token_ids_1N, (0, missing)),
        position_ids_1N=F.pad(row.position_ids_1N, (0, missing)),
        lengths=(*row.lengths, missing),
        predictor_K=row.predictor_K,
        source_N=F.pad(row.source_N, (0, missing), value=-1),
    )


def _share(batch: micro_batches.MicroBatch, row: micro_batches.TokenRow, rank: int, size: int) -> MegatronRow:
    device = row.token_ids_1N.device
    bounds = torch.tensor([0, *np.cumsum(row.lengths)], dtype=torch.int32, device=device)
    longest = max(row.lengths)
    mine_M = torch.from_numpy(context.tokens_of_share(row.lengths, rank, size)).to(device) if size > 1 else None
    source_M = row.source_N if mine_M is None else row.source_N[mine_M]
    experts_BTLK = batch.routed_experts_BTLK
    sequences = RoutedSequences(
        "thd",
        bounds,
        bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(row.lengths),
        routed_experts_MLK=None if experts_BTLK is None else routing.of_row(experts_BTLK, source_M)[0],
    )
    if mine_M is None:
        valid_L = torch.arange(len(row.predictor_K), device=device)
        return MegatronRow(batch, row.token_ids_1N, row.position_ids_1N, sequences, row.predictor_K, valid_L)
    number_N = torch.full((sum(row.lengths),), -1, device=device)
    number_N[mine_M] = torch.arange(len(mine_M), device=device)
    predictor_K = number_N[row.predictor_K]
    valid_L = (predictor_K >= 0).nonzero()[:, 0]
    mine = row.token_ids_1N[:, mine_M], row.position_ids_1N[:, mine_M]
    return MegatronRow(batch, *mine, sequences, predictor_K[valid_L], valid_L)
