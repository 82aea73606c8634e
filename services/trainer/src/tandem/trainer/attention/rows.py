"""Attention over rows of several sequences, in Hugging Face models.

A model takes a `TokenRow`, packed or with shared prompts, through `transformers.AttentionInterface`, by the name
`ATTENTION_NAME`. Without a row this is the library's own attention, to the bit. Layers with sliding attention or sinks
differ, because the library needs a mask for them, and there is none.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tandem.common.attention.on_gpu import attend_on_gpu
from tandem.common.attention.segments import attend as attend_within
from tandem.trainer.micro_batches import TokenRow

ATTENTION_NAME = "tandem_rows"


def attend(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    row: TokenRow | None = None,
    told_windows: dict[int, int | None] | None = None,
    ends_2S: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally, within each sequence of a row: ``[1, H, N, D]`` in, ``[1, N, H, D]`` out.

    Keys and values of a shared prompt are copied to all of its samples, so that the fast kernels for plain causal
    attention apply. Gradients of all samples add up in the prompt. `told_windows` collects the window that each layer
    gives for its sliding attention. `ends_2S` stands for a packed row on a GPU
    (`tandem.common.attention.on_gpu.find_boundaries`): unlike its lengths it is an input of a compiled graph.
    """
    window, sinks_H = kwargs.get("sliding_window"), kwargs.get("s_aux")
    if ends_2S is not None:
        if sinks_H is not None:
            raise ValueError("attention with sinks cannot be compiled: set policy.compile to false")
        query_NHD, key_NGD, value_NGD = (each[0].transpose(0, 1) for each in (query_BHTD, key_BHTD, value_BHTD))
        longest = (query_NHD.shape[0], key_NGD.shape[0])
        scaling = kwargs.get("scaling")
        return attend_on_gpu(query_NHD, key_NGD, value_NGD, ends_2S, longest, scaling, window)[None], None
    if told_windows is not None:
        told_windows[int(module.layer_idx)] = window  # type: ignore[arg-type]
    source_BW = None if row is None else row.source_BW
    is_packed = row is not None and source_BW is None
    if source_BW is not None:
        query_BHTD, key_BHTD, value_BHTD = (_spread(each, source_BW) for each in (query_BHTD, key_BHTD, value_BHTD))
    if not is_packed and window is None and sinks_H is None:
        attended_BTHD, _ = sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **kwargs)
    else:
        unknown = [name for name in ("softcap", "position_bias") if kwargs.get(name) is not None]
        if unknown:
            raise ValueError(f"its attention needs {unknown[0]}")
        num_rows, _, width, _ = query_BHTD.shape
        lengths = row.lengths if row is not None and is_packed else (width,) * num_rows
        query_NHD, key_NGD, value_NGD = (
            each.transpose(1, 2).flatten(0, 1) for each in (query_BHTD, key_BHTD, value_BHTD)
        )
        segments = [(length, length) for length in lengths]
        attended_NHD = attend_within(query_NHD, key_NGD, value_NGD, segments, kwargs.get("scaling"), window, sinks_H)
        attended_BTHD = attended_NHD.view(num_rows, width, *attended_NHD.shape[1:])
    if row is not None and row.taken_N is not None:
        attended_BTHD = attended_BTHD.flatten(0, 1).index_select(0, row.taken_N)[None]
    return attended_BTHD, None


def _spread(tensor_1HND: torch.Tensor, source_BW: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, W, D]``."""
    tensor_NHD = tensor_1HND[0].transpose(0, 1)
    return tensor_NHD.index_select(0, source_BW.flatten()).view(*source_BW.shape, *tensor_NHD.shape[1:]).transpose(1, 2)


transformers.AttentionInterface.register(ATTENTION_NAME, attend)
