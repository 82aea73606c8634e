"""Causal attention within the segments of one row on a GPU: one kernel computes all of them.

It is FlashAttention-2 (Dao 2023, arXiv:2307.08691) with variable lengths.

Shapes are those of `tandem.common.attention.segments`.
"""

from __future__ import annotations

import functools

import torch


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
