"""Context parallelism: ranks share every sequence, and attention gathers keys and values.

A sequence is divided into twice as many chunks as there are ranks. Rank ``r`` of ``n`` has chunks ``r`` and ``2n - 1 -
r`` of each, so that causal attention costs all ranks the same. Keys and values are gathered, as in Llama 3 (Grattafiori
et al. 2024, arXiv:2407.21783, section 3.3.2). Padded and packed rows are both treated as segments of one row.

Shapes: ``N`` tokens of the whole row and ``L`` of this rank's share; ``M`` keys that this rank's chunks see, chunk by
    chunk; ``H`` heads, ``G`` of keys and values, of dimension ``D``; ``K`` valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import transformers
from numpy.typing import NDArray

from tandem.common.attention.segments import attend
from tandem.trainer.micro_batches import MicroBatch, TokenRow

ATTENTION_NAME = "tandem_context"


class ContextShare(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The part of a row that one rank of a context-parallel group computes."""

    group: dist.ProcessGroup
    token_L: torch.Tensor
    """int64; position in the row of each token of the share."""
    key_M: torch.Tensor
    """int64; position of each key in the concatenation of the ranks' shares."""
    chunks: tuple[tuple[int, int], ...]
    """For each chunk, its tokens and the keys that it sees, of which the last are its own."""
    predictor_K: torch.Tensor
    """int64; the share's token that predicts each valid token; -1 if another rank has it."""


def as_row(batch: MicroBatch) -> TokenRow:
    """Return a micro-batch as one row: its packed row if there is one, otherwise its padded rows end to end."""
    if batch.row is not None:
        return batch.row
    num_rows, width = batch.token_ids_BT.shape
    position_ids_T = torch.arange(width, device=batch.token_ids_BT.device)
    return TokenRow(
        token_ids_1N=batch.token_ids_BT.reshape(1, -1),
        position_ids_1N=position_ids_T.repeat(num_rows)[None],
        lengths=(width,) * num_rows,
        predictor_K=batch.loss_mask_BT.flatten().nonzero()[:, 0] - 1,
        source_N=torch.arange(num_rows * width, device=batch.token_ids_BT.device),
    )


def inputs_of_share(batch: MicroBatch, group: dist.ProcessGroup) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the inputs of a model with `context_attention` on this rank, and `ContextShare.predictor_K`."""
    row = as_row(batch)
    share = share_of(row.lengths, row.predictor_K, group)
    inputs = {
        "input_ids": row.token_ids_1N[:, share.token_L],
        "position_ids": row.position_ids_1N[:, share.token_L],
        "context_share": share,
    }
    return inputs, share.predictor_K


def sources_of_share(batch: MicroBatch, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the position in the micro-batch of each token of this rank's share; -1 in the padding."""
    row = as_row(batch)
    mine = tokens_of_share(row.lengths, dist.get_rank(group), dist.get_world_size(group))
    return row.source_N[torch.from_numpy(mine).to(row.source_N.device)]


def context_attention(
    module: torch.nn.Module,
    query_1HLD: torch.Tensor,
    key_1GLD: torch.Tensor,
    value_1GLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    context_share: ContextShare | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each segment of the row, for this rank's share ``[1, L, H, D]``."""
    assert context_share is not None, "a model whose sequences are shared gets its share"
    query_LHD, key_LGD, value_LGD = (tensor[0].transpose(0, 1) for tensor in (query_1HLD, key_1GLD, value_1GLD))
    keys_values = gather_shares(torch.stack([key_LGD, value_LGD], dim=1), context_share.group)
    key_MGD, value_MGD = keys_values.index_select(0, context_share.key_M).unbind(1)
    chunks = context_share.chunks
    return attend(query_LHD, key_MGD, value_MGD, chunks, scaling, sliding_window, s_aux, softcap)[None], None


transformers.AttentionInterface.register(ATTENTION_NAME, context_attention)


def sum_shares(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add up partial values over the ranks of a group, which all go on with the sum in the same way.

    The gradient of the sum is that of each part.
    """
    total: torch.Tensor = _SumShares.apply(values, group)  # type: ignore[no-untyped-call]
    return total


def gather_shares(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension.

    The gradient of each part goes back to its rank, summed over all ranks.
    """
    gathered: torch.Tensor = _GatherShares.apply(part, group)  # type: ignore[no-untyped-call]
    return gathered


class _SumShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = list(grads[0].contiguous().chunk(dist.get_world_size(ctx.group)))
        part = torch.empty_like(parts[0])
        dist.reduce_scatter(part, parts, group=ctx.group)
        return part, None


def share_of(lengths: Sequence[int], predictor_K: torch.Tensor, group: dist.ProcessGroup) -> ContextShare:
    """Return this rank's share of a row. The length of each segment is a multiple of twice the group's size.

    `predictor_K` is the row's token that predicts each counted token.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tokens = [tokens_of_share(lengths, peer, size) for peer in range(size)]
    # The position of each token of the row in the concatenated shares.
    place_N = np.empty(sum(lengths), dtype=np.int64)
    place_N[np.concatenate(tokens)] = np.arange(len(place_N))
    keys, chunks, first = [], [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            keys.append(place_N[first : first + (number + 1) * chunk])
            chunks.append((chunk, (number + 1) * chunk))
        first += length
    mine_N = np.full(len(place_N), -1, dtype=np.int64)
    mine_N[tokens[rank]] = np.arange(len(tokens[rank]))

    def moved(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(predictor_K.device)

    return ContextShare(
        group=group,
        token_L=moved(tokens[rank]),
        key_M=moved(np.concatenate(keys)),
        chunks=tuple(chunks),
        predictor_K=moved(mine_N)[predictor_K],
    )


def tokens_of_share(lengths: Sequence[int], rank: int, size: int) -> NDArray[np.int64]:
    """Return the tokens of a row that a rank has: chunks `rank` and ``2 * size - 1 - rank`` of each segment."""
    parts, first = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        assert chunk * 2 * size == length, f"{length} tokens do not divide into {2 * size} chunks"
        for number in (rank, 2 * size - 1 - rank):
            parts.append(np.arange(first + number * chunk, first + (number + 1) * chunk))
        first += length
    return np.concatenate(parts)
