"""Causal attention within segments of one row: no token sees another segment.

On a GPU one kernel does all segments (FlashAttention-2, Dao 2023, arXiv:2307.08691, for sequences of several lengths);
elsewhere those of one size that follow each other go together, a block of queries at a time, so that no matrix of all
scores ever exists.

Shapes: ``L`` queries and ``M`` keys of all segments, one after the other; ``B`` segments of one size; ``H`` heads of
queries, ``G`` of keys and values, of dimension ``D``; ``R`` queries of a block; ``S`` keys that it sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

_BLOCK = 256
"""Queries of a block."""


def attend(
    query_LHD: torch.Tensor,
    key_MGD: torch.Tensor,
    value_MGD: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    scale: float | None = None,
) -> torch.Tensor:
    """Return ``[L, H, D]``.

    Args:
        query_LHD: of all segments.
        key_MGD: of all segments; each head serves ``H / G`` heads of queries that follow each other.
        value_MGD: as the keys.
        segments: numbers of queries and of keys of each. The queries are its last tokens: the last one sees all keys of
            the segment, each one before it a key fewer.
        scale: of the scores; by default ``1 / sqrt(D)``.
    """
    has_kernel = query_LHD.is_cuda and query_LHD.dtype in (torch.bfloat16, torch.float16)
    if has_kernel and query_LHD.shape[2] == value_MGD.shape[2]:
        return _attend_on_gpu(query_LHD, key_MGD, value_MGD, segments, scale)
    if query_LHD.is_cuda:  # what is left there takes as many heads of keys as of queries, or makes all scores
        num_each = query_LHD.shape[1] // key_MGD.shape[1]
        key_MGD, value_MGD = (tensor.repeat_interleave(num_each, dim=1) for tensor in (key_MGD, value_MGD))
    mask_RS = _mask(segments, query_LHD)
    parts, query, key = [], 0, 0
    for (num_queries, num_keys), run in itertools.groupby(segments):
        size = len(list(run))
        queries, keys = slice(query, query + size * num_queries), slice(key, key + size * num_keys)
        query, key = queries.stop, keys.stop
        query_BLHD, key_BMGD, value_BMGD = (
            tensor.view(size, -1, *tensor.shape[1:]) for tensor in (query_LHD[queries], key_MGD[keys], value_MGD[keys])
        )
        parts.append(_attend_equal(query_BLHD, key_BMGD, value_BMGD, mask_RS, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_equal(
    query_BLHD: torch.Tensor,
    key_BMGD: torch.Tensor,
    value_BMGD: torch.Tensor,
    mask_RS: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Return what the queries of segments of one size attend to, end to end, a block of each at a time."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query_BLHD, key_BMGD, value_BMGD))
    is_grouped = query.shape[1] != key.shape[1]
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == num_keys:
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
        return attended.transpose(1, 2).flatten(0, 1)
    assert mask_RS is not None, "made for segments with more keys than queries"
    parts = []
    for first in range(0, num_queries, _BLOCK):
        last = min(first + _BLOCK, num_queries)
        seen = num_keys - num_queries + last
        # Every mask of this kind is the lower right corner of a larger one.
        mask = mask_RS[len(mask_RS) - (last - first) :, mask_RS.shape[1] - seen :]
        parts.append(
            scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :, :seen],
                value[:, :, :seen],
                attn_mask=mask,
                scale=scale,
                enable_gqa=is_grouped,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)


def _mask(segments: Sequence[tuple[int, int]], like: torch.Tensor) -> torch.Tensor | None:
    """Return what to add to the scores of the largest block, minus infinity above the diagonal that ends at the last.

    None where no segment has more keys than queries.
    """
    longer = [num_keys for num_queries, num_keys in segments if num_keys > num_queries]
    if not longer:
        return None
    num_keys = max(longer)
    num_queries = min(_BLOCK, num_keys)
    return like.new_full((num_queries, num_keys), -torch.inf).triu(1 + num_keys - num_queries)


def _attend_on_gpu(
    query_LHD: torch.Tensor,
    key_MGD: torch.Tensor,
    value_MGD: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    scale: float | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # only CUDA has a kernel for it

    lengths_2S = torch.tensor([(0, 0), *segments], dtype=torch.int32).cumsum(dim=0, dtype=torch.int32).T
    ends_2S = lengths_2S.contiguous().to(query_LHD.device, non_blocking=True)
    attended_LHD = varlen_attn(
        query_LHD,
        key_MGD,
        value_MGD,
        ends_2S[0],
        ends_2S[1],
        max(num_queries for num_queries, _ in segments),
        max(num_keys for _, num_keys in segments),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query_LHD.shape[1] != key_MGD.shape[1],
    )
    assert isinstance(attended_LHD, torch.Tensor), "nothing but the result was asked for"
    return attended_LHD
