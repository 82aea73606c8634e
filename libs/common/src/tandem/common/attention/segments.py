"""Causal attention within the segments of one row: no token sees another segment.

On a GPU one kernel computes all segments: FlashAttention-2 (Dao 2023, arXiv:2307.08691) with variable lengths.
Elsewhere consecutive segments of the same size are computed together, one block of queries at a time, so that the
matrix of all scores never exists.

A window is the number of keys that a query sees, including its own (Beltagy et al. 2020, arXiv:2004.05150, section
3.1; Jiang et al. 2023, arXiv:2310.06825, section 2). A sink is a score without a key: it takes part in the softmax
and adds no value (gpt-oss; Xiao et al. 2023, arXiv:2309.17453, section 3.3). Capped scores are ``cap * tanh(score /
cap)`` (Gemma 2: Riviere et al. 2024, arXiv:2408.00118, section 2).

Shapes: ``L`` queries and ``M`` keys of all segments, concatenated; ``B`` segments of one size; ``H`` query heads,
``G`` key and value heads, of dimension ``D``; ``R`` queries in a block; ``S`` keys that the block sees.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

_BLOCK = 256
"""Queries in a block."""

_KEPT_BLOCKS = 4
"""Most blocks of a sequence whose scores are kept for the backward pass, where a kernel keeps them."""


def attend_on_gpu(
    query_LHD: torch.Tensor,
    key_MGD: torch.Tensor,
    value_MGD: torch.Tensor,
    ends_2S: torch.Tensor,
    longest: tuple[int, int],
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention output of bfloat16 or float16 tensors on a GPU, as `segments.attend` does.

    Args:
        query_LHD: queries; keys and values as there.
        key_MGD: keys.
        value_MGD: values.
        ends_2S: the segments' `boundaries`.
        longest: no segment has more queries or keys than this.
        scale: as there.
        window: as there.
    """
    from torch.nn.attention.varlen import varlen_attn  # only CUDA has a kernel for it

    attended_LHD = varlen_attn(
        query_LHD,
        key_MGD,
        value_MGD,
        ends_2S[0],
        ends_2S[1],
        *longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_LHD.shape[1] != key_MGD.shape[1],
    )
    assert isinstance(attended_LHD, torch.Tensor), "only the output was requested"
    return attended_LHD


@functools.lru_cache(maxsize=4)  # every layer asks for the same row, and each copy waits for the GPU
def find_boundaries(segments: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Return where segments begin and end, ``[2, S + 1]``, int32: in the queries, and in the keys."""
    sizes_2S = torch.tensor([(0, 0), *segments], dtype=torch.int32).cumsum(dim=0, dtype=torch.int32).T
    return sizes_2S.contiguous().to(device)


def attend(
    query_LHD: torch.Tensor,
    key_MGD: torch.Tensor,
    value_MGD: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    scale: float | None = None,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Return the attention output, ``[L, H, D]``.

    Args:
        query_LHD: queries of all segments.
        key_MGD: keys of all segments; each key head serves ``H / G`` consecutive query heads.
        value_MGD: values, in the layout of the keys.
        segments: for each segment, its number of queries and of keys. The queries are the segment's last tokens: the
            last query sees all of its keys, each earlier one sees one key fewer.
        scale: factor of the scores; by default ``1 / sqrt(D)``.
        window: most keys that a query sees; None for all.
        sinks_H: sink of each query head; None for a model without sinks.
        cap: limit of the scores, which come close to it and never reach it; None for none.
    """
    has_kernel = query_LHD.is_cuda and query_LHD.dtype in (torch.bfloat16, torch.float16) and sinks_H is None
    if has_kernel and cap is None and query_LHD.shape[2] == value_MGD.shape[2]:
        longest = max(num_queries for num_queries, _ in segments), max(num_keys for _, num_keys in segments)
        ends_2S = find_boundaries(tuple(segments), query_LHD.device)
        return attend_on_gpu(query_LHD, key_MGD, value_MGD, ends_2S, longest, scale, window)
    if query_LHD.is_cuda:  # the remaining kernels need as many key heads as query heads, or build all scores
        num_each = query_LHD.shape[1] // key_MGD.shape[1]
        key_MGD, value_MGD = (tensor.repeat_interleave(num_each, dim=1) for tensor in (key_MGD, value_MGD))
    mask_RS: torch.Tensor | None = None
    parts, query, key = [], 0, 0
    for (num_queries, num_keys), run in itertools.groupby(segments):
        size = len(list(run))
        queries, keys = slice(query, query + size * num_queries), slice(key, key + size * num_keys)
        query, key = queries.stop, keys.stop
        query_BLHD = query_LHD[queries].view(size, -1, *query_LHD.shape[1:])
        key_BMGD = key_MGD[keys].view(size, -1, *key_MGD.shape[1:])
        value_BMGD = value_MGD[keys].view(size, -1, *value_MGD.shape[1:])
        if mask_RS is None and num_keys > num_queries:
            mask_RS = _make_mask(segments, query_LHD)
        if sinks_H is None and cap is None and (window is None or window >= num_keys):
            parts.append(_attend_equal(query_BLHD, key_BMGD, value_BMGD, mask_RS, scale))
        else:
            parts.append(_attend_near(query_BLHD, key_BMGD, value_BMGD, scale, window or num_keys, sinks_H, cap))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_equal(
    query_BLHD: torch.Tensor,
    key_BMGD: torch.Tensor,
    value_BMGD: torch.Tensor,
    mask_RS: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Return the attention output of segments of one size, one block of queries at a time."""
    query, key, value = query_BLHD.transpose(1, 2), key_BMGD.transpose(1, 2), value_BMGD.transpose(1, 2)
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
        # Every such mask is the lower right corner of a larger one.
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


def _attend_near(
    query_BLHD: torch.Tensor,
    key_BMGD: torch.Tensor,
    value_BMGD: torch.Tensor,
    scale: float | None,
    window: int,
    sinks_H: torch.Tensor | None,
    cap: float | None,
) -> torch.Tensor:
    """Return the same for queries with a window, sinks or a cap; a block reads only the keys that its queries may
    see."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query_BLHD, key_BMGD, value_BMGD))
    num_queries, before = query.shape[2], key.shape[2] - query.shape[2]
    mask_RS = _make_window_mask(min(_BLOCK, num_queries), window, query)
    attend_block = functools.partial(_attend_block, scale=scale, sinks_H=sinks_H, cap=cap)
    keeps_scores = sinks_H is not None or cap is not None
    if keeps_scores and torch.is_grad_enabled() and num_queries > _KEPT_BLOCKS * _BLOCK:
        attend_block = functools.partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=False)
    parts = []
    for first in range(0, num_queries, _BLOCK):
        last = min(first + _BLOCK, num_queries)
        seen = slice(max(0, before + first - window + 1), before + last)
        num_missing = max(0, window - 1 - before - first)  # keys that a block further on would see before these
        mask = mask_RS[: last - first, num_missing : num_missing + seen.stop - seen.start]
        parts.append(attend_block(query[:, :, first:last], key[:, :, seen], value[:, :, seen], mask))
    return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)


def _make_window_mask(num_queries: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Return the mask to add to the scores of a block within a sequence, ``[R, window - 1 + R]``.

    The masks of all blocks are views of it, since autograd keeps each of them.
    """
    row_R1 = torch.arange(num_queries, device=like.device)[:, None]
    key_S = torch.arange(window - 1 + num_queries, device=like.device)
    is_hidden_RS = (key_S >= row_R1 + window) | (key_S < row_R1)
    return like.new_zeros(is_hidden_RS.shape).masked_fill_(is_hidden_RS, -torch.inf)


def _attend_block(
    query_BHRD: torch.Tensor,
    key_BGSD: torch.Tensor,
    value_BGSD: torch.Tensor,
    mask_RS: torch.Tensor,
    *,
    scale: float | None,
    sinks_H: torch.Tensor | None,
    cap: float | None,
) -> torch.Tensor:
    """Return the attention output of a block, ``[B, H, R, D]``."""
    if cap is not None:
        return attend_capped(query_BHRD, key_BGSD, value_BGSD, mask_RS, scale, cap, sinks_H)
    mask = mask_RS[None, None]
    if sinks_H is not None:  # one more key and value of zeros; the mask holds its score
        sinks_1HR1 = sinks_H.to(query_BHRD.dtype)[None, :, None, None].expand(-1, -1, query_BHRD.shape[2], -1)
        mask = torch.cat((mask.expand(-1, len(sinks_H), -1, -1), sinks_1HR1), dim=3)
        key_BGSD, value_BGSD = (pad(tensor, (0, 0, 0, 1)) for tensor in (key_BGSD, value_BGSD))
    is_grouped = query_BHRD.shape[1] != key_BGSD.shape[1]
    return scaled_dot_product_attention(
        query_BHRD, key_BGSD, value_BGSD, attn_mask=mask, scale=scale, enable_gqa=is_grouped
    )


def attend_capped(
    query_BHRD: torch.Tensor,
    key_BGSD: torch.Tensor,
    value_BGSD: torch.Tensor,
    mask_RS: torch.Tensor,
    scale: float | None,
    cap: float,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output ``[B, H, R, D]`` with scores that `cap` limits.

    `mask_RS` is added to the capped scores, and broadcast to ``[B, G, E, R, S]``, where
    ``E`` query heads share a key head; the other arguments are `attend`'s.
    """
    num_rows, _, num_queries, head_dim = query_BHRD.shape
    query_BGERD = query_BHRD.view(num_rows, key_BGSD.shape[1], -1, num_queries, head_dim)
    scores_BGERS = query_BGERD @ key_BGSD[:, :, None].transpose(3, 4) * (head_dim**-0.5 if scale is None else scale)
    scores_BGERS = (scores_BGERS / cap).tanh() * cap + mask_RS
    if sinks_H is not None:  # one more score, and no value
        sinks_GE11 = sinks_H.to(scores_BGERS.dtype).view(*scores_BGERS.shape[1:3], 1, 1)
        sinks_BGER1 = sinks_GE11.expand(num_rows, -1, -1, num_queries, -1)
        scores_BGERS = torch.cat((scores_BGERS, sinks_BGER1), dim=4)
    weights_BGERS = scores_BGERS.softmax(dim=4, dtype=torch.float32).to(query_BHRD.dtype)
    attended_BGERD = weights_BGERS[..., : key_BGSD.shape[2]] @ value_BGSD[:, :, None]
    return attended_BGERD.flatten(1, 2)


def _make_mask(segments: Sequence[tuple[int, int]], like: torch.Tensor) -> torch.Tensor:
    """Return the mask to add to the scores of the largest block: minus infinity above the diagonal that ends at the
    last.

    Some segment has more keys than queries.
    """
    num_keys = max(num_keys for num_queries, num_keys in segments if num_keys > num_queries)
    num_queries = min(_BLOCK, num_keys)
    return like.new_full((num_queries, num_keys), -torch.inf).triu(1 + num_keys - num_queries)
