"""Attention within segments by its formula: softmax of the scaled scores of the keys that a token may see."""

from __future__ import annotations

import torch

SEGMENTS = {
    "one": [(7, 7)],
    "several": [(3, 3), (1, 1), (8, 8)],
    "more keys than queries": [(2, 2), (2, 8), (3, 12), (5, 5)],
    "a single key": [(1, 1)],
    "of one size": [(4, 4), (4, 4), (4, 4), (6, 6), (6, 6)],
    "of one size, more keys than queries": [(300, 310), (300, 310), (2, 2)],
    "several blocks": [(600, 700), (257, 514)],
}


def formula(
    query_LHD: torch.Tensor,
    key_MGD: torch.Tensor,
    value_MGD: torch.Tensor,
    segments: list[tuple[int, int]],
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    num_each = query_LHD.shape[1] // key_MGD.shape[1]
    parts = []
    at_query = at_key = 0
    for num_queries, num_keys in segments:
        for index in range(num_queries):
            position = num_keys - num_queries + index
            first = 0 if window is None else max(0, position + 1 - window)
            seen = slice(at_key + first, at_key + position + 1)
            key_SHD = key_MGD[seen].repeat_interleave(num_each, dim=1)
            value_SHD = value_MGD[seen].repeat_interleave(num_each, dim=1)
            scores_SH = (query_LHD[at_query + index] * key_SHD).sum(dim=-1) * 0.3
            if cap is not None:
                scores_SH = cap * torch.tanh(scores_SH / cap)
            weights_SH = scores_SH.softmax(dim=0)
            if sinks_H is not None:
                weights_SH = torch.cat((scores_SH, sinks_H[None])).softmax(dim=0)[:-1]
            parts.append((weights_SH[:, :, None] * value_SHD).sum(dim=0))
        at_query, at_key = at_query + num_queries, at_key + num_keys
    return torch.stack(parts)
