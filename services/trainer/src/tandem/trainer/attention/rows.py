"""Attention over rows of several sequences, in Hugging Face models.

A model takes a `TokenRow`, packed or with shared prompts, through `transformers.AttentionInterface`, by the name
`ATTENTION_NAME`. Without a row this is the library's own attention, to the bit. Layers with sliding attention, chunks,
sinks or capped scores differ, because the library needs a mask or other kernels for them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tandem.common.attention.chunks import find_chunk_size, split_segments
from tandem.common.attention.segments import attend as attend_within
from tandem.common.attention.segments import attend_on_gpu
from tandem.trainer.micro_batches import TokenRow

ATTENTION_NAME = "tandem_rows"
CHUNKS_ATTENTION_NAME = "tandem_rows_in_chunks"
"""Name for models some of whose layers attend within chunks."""


def attend(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    row: TokenRow | None = None,
    told_windows: dict[int, int | None] | None = None,
    ends_2S: torch.Tensor | None = None,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally, within each sequence of a row: ``[1, H, N, D]`` in, ``[1, N, H, D]`` out.

    Keys and values of a shared prompt are copied to all of its samples, so that the fast kernels for plain causal
    attention apply. Gradients of all samples add up in the prompt. `told_windows` collects the window that each layer
    gives for its sliding attention. `ends_2S` stands for a packed row on a GPU
    (`tandem.common.attention.segments.find_boundaries`): unlike its lengths it is an input of a compiled graph.
    `chunk_size` comes from `attend_in_chunks`.
    """
    window, sinks_H, cap = kwargs.get("sliding_window"), kwargs.get("s_aux"), kwargs.get("softcap")
    if ends_2S is not None:
        if sinks_H is not None or cap is not None or chunk_size is not None:
            kind = "in chunks" if chunk_size is not None else "with sinks" if cap is None else "with capped scores"
            raise ValueError(f"attention {kind} cannot be compiled: set policy.compile to false")
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
    is_plain = window is None and sinks_H is None and cap is None and chunk_size is None
    if is_plain and not is_packed:
        attended_BTHD, _ = sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **kwargs)
    else:
        if kwargs.get("position_bias") is not None:
            raise ValueError("its attention needs position_bias")
        num_rows, _, width, _ = query_BHTD.shape
        lengths = row.lengths if row is not None and is_packed else (width,) * num_rows
        query_NHD, key_NGD, value_NGD = (
            each.transpose(1, 2).flatten(0, 1) for each in (query_BHTD, key_BHTD, value_BHTD)
        )
        segments = [(length, length) for length in lengths]
        if chunk_size is not None:
            segments = split_segments(segments, chunk_size)
        scaling = kwargs.get("scaling")
        attended_NHD = attend_within(query_NHD, key_NGD, value_NGD, segments, scaling, window, sinks_H, cap)
        attended_BTHD = attended_NHD.view(num_rows, width, *attended_NHD.shape[1:])
    if row is not None and row.taken_N is not None:
        attended_BTHD = attended_BTHD.flatten(0, 1).index_select(0, row.taken_N)[None]
    return attended_BTHD, None


def attend_in_chunks(module: Any, *tensors: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attend as `attend` does, within chunks where the layer's type says so."""
    kwargs["chunk_size"] = find_chunk_size(module)
    return attend(module, *tensors, **kwargs)


def _spread(tensor_1HND: torch.Tensor, source_BW: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, W, D]``."""
    tensor_NHD = tensor_1HND[0].transpose(0, 1)
    return tensor_NHD.index_select(0, source_BW.flatten()).view(*source_BW.shape, *tensor_NHD.shape[1:]).transpose(1, 2)


transformers.AttentionInterface.register(ATTENTION_NAME, attend)
transformers.AttentionInterface.register(CHUNKS_ATTENTION_NAME, attend_in_chunks)
