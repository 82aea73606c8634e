"""Causal attention within segments of one row: no token sees another segment.

On a GPU one kernel does all segments (FlashAttention-2, Dao 2023, arXiv:2307.08691, for sequences of several lengths);
elsewhere those of one size that follow each other go together, a block of queries at a time, so that no matrix of all
scores ever exists.

A window is a number of keys, its own among them, that a query sees (Beltagy et al. 2020, arXiv:2004.05150, section
3.1; Jiang et al. 2023, arXiv:2310.06825, section 2). A sink is the score of nothing: it takes part in the softmax and
adds no value (gpt-oss; Xiao et al. 2023, arXiv:2309.17453, section 3.3).

Shapes: ``L`` queries and ``M`` keys of all segments, one after the other; ``B`` segments of one size; ``H`` heads of
queries, ``G`` of keys and values, of dimension ``D``; ``R`` queries of a block; ``S`` keys that it sees.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

_BLOCK = 256
"""Queries of a block."""


def attend(
    query_LHD: torch.Tensor,
    key_MGD: torch.Tensor,
    value_MGD: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    scale: float | None = None,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``[L, H, D]``.

    Args:
        query_LHD: of all segments.
        key_MGD: of all segments; each head serves ``H / G`` heads of queries that follow each other.
        value_MGD: as the keys.
        segments: numbers of queries and of keys of each. The queries are its last tokens: the last one sees all keys of
            the segment, each one before it a key fewer.
        scale: of the scores; by default ``1 / sqrt(D)``.
        window: keys that a query sees at most; None for all.
        sinks_H: of each head of queries; None where there are none.
    """
    has_kernel = query_LHD.is_cuda and query_LHD.dtype in (torch.bfloat16, torch.float16) and sinks_H is None
    if has_kernel and query_LHD.shape[2] == value_MGD.shape[2]:
        return _attend_on_gpu(query_LHD, key_MGD, value_MGD, segments, scale, window)
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
        if sinks_H is None and (window is None or window >= num_keys):
            parts.append(_attend_equal(query_BLHD, key_BMGD, value_BMGD, mask_RS, scale))
        else:
            parts.append(_attend_near(query_BLHD, key_BMGD, value_BMGD, scale, window or num_keys, sinks_H))
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


def _attend_near(
    query_BLHD: torch.Tensor,
    key_BMGD: torch.Tensor,
    value_BMGD: torch.Tensor,
    scale: float | None,
    window: int,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return the same of queries with a window or with sinks; a block reads the keys that its queries may see."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query_BLHD, key_BMGD, value_BMGD))
    is_grouped = query.shape[1] != key.shape[1]
    num_queries, before = query.shape[2], key.shape[2] - query.shape[2]
    parts = []
    for first in range(0, num_queries, _BLOCK):
        last = min(first + _BLOCK, num_queries)
        seen = slice(max(0, before + first - window + 1), before + last)
        position_R1 = torch.arange(before + first, before + last, device=query.device)[:, None]
        key_S = torch.arange(seen.start, seen.stop, device=query.device)
        is_hidden_RS = (key_S > position_R1) | (key_S <= position_R1 - window)
        mask = query.new_zeros(is_hidden_RS.shape).masked_fill_(is_hidden_RS, -torch.inf)[None, None]
        keys, values = key[:, :, seen], value[:, :, seen]
        if sinks_H is not None:  # one more key of zeros, whose score the mask gives, and whose value is zero
            sinks_1HR1 = sinks_H.to(query.dtype)[None, :, None, None].expand(-1, -1, last - first, -1)
            mask = torch.cat((mask.expand(-1, len(sinks_H), -1, -1), sinks_1HR1), dim=3)
            keys, values = (pad(tensor, (0, 0, 0, 1)) for tensor in (keys, values))
        parts.append(
            scaled_dot_product_attention(
                query[:, :, first:last], keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)


def sliding_windows(config: Any) -> tuple[int | None, ...]:
    """Return how many tokens attention slides over in each layer, by a model's text configuration of transformers.

    None in a layer that sees all.
    """
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or not layer_types:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if each == "sliding_attention" else None for each in layer_types[: config.num_hidden_layers])


def unstable_rotation(config: Any, max_length: int) -> str | None:
    """Return the type of rotary embeddings that turn a token by angles that depend on how long its row becomes.

    None where none does up to `max_length` tokens. `config` is a model's text configuration of transformers.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in parameters.values() if isinstance(next(iter(parameters.values()), None), dict) else (parameters,):
        kind = each.get("rope_type")
        limit = None
        if kind == "longrope":
            limit = each.get("original_max_position_embeddings") or config.max_position_embeddings
        elif kind == "dynamic":
            limit = config.max_position_embeddings
        if limit is not None and max_length > limit:
            return str(kind)
    return None


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
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # only CUDA has a kernel for it

    ends_2S = _ends(tuple(segments), query_LHD.device)
    attended_LHD = varlen_attn(
        query_LHD,
        key_MGD,
        value_MGD,
        ends_2S[0],
        ends_2S[1],
        max(num_queries for num_queries, _ in segments),
        max(num_keys for _, num_keys in segments),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_LHD.shape[1] != key_MGD.shape[1],
    )
    assert isinstance(attended_LHD, torch.Tensor), "nothing but the result was asked for"
    return attended_LHD


@functools.lru_cache(maxsize=4)  # every layer asks for the same row's, and each copy waits for the GPU
def _ends(segments: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Return where each segment begins and the last ends, ``[2, S + 1]``: in the queries, and in the keys."""
    sizes_2S = torch.tensor([(0, 0), *segments], dtype=torch.int32).cumsum(dim=0, dtype=torch.int32).T
    return sizes_2S.contiguous().to(device)
