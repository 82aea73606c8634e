"""Attention over rows of several sequences, in Hugging Face models.

A model takes a `Row`, packed or with shared prompts, through `transformers.AttentionInterface`, by the name
`ATTENTION_NAME`. Without a row this is the library's own attention, to the bit. Layers with sliding attention or sinks
differ, because the library needs a mask for them, and there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tandem.common.segments import attend as attend_within
from tandem.common.segments import attend_on_gpu, sliding_windows, unstable_rotation
from tandem.config.models.vision_families import VISION
from tandem.samples.images.blocks import Block, attend_blocks
from tandem.trainer.batching.packing import pack_row
from tandem.trainer.batching.shared_prompts import share_prompts
from tandem.trainer.micro_batches import ImageBlock, Row

ATTENTION_NAME = "tandem_rows"
WITH_IMAGES = "tandem_rows_with_images"
"""Attention of families whose images attend in both directions (`tandem.samples.images.blocks`)."""


def attend(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    row: Row | None = None,
    told_windows: dict[int, int | None] | None = None,
    ends_2S: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally, within each sequence of a row: ``[1, H, N, D]`` in, ``[1, N, H, D]`` out.

    Keys and values of a shared prompt are copied to all of its samples, so that the fast kernels for plain causal
    attention apply. Gradients of all samples add up in the prompt. `told_windows` collects the window that each layer
    gives for its sliding attention. `ends_2S` stands for a packed row on a GPU (`tandem.common.segments.boundaries`):
    unlike its lengths it is an input of a compiled graph.
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


def attend_with_images(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    image_blocks: Sequence[ImageBlock] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `attend` does, and in both directions among the tokens of an image."""
    attended_BTHD, _ = attend(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **kwargs)
    scaling, window = kwargs.get("scaling"), kwargs.get("sliding_window")
    causal_BTHD = attended_BTHD
    attended_BTHD = attended_BTHD.clone()
    for row, size, source_M in image_blocks:
        num = len(source_M)
        attended_1MHD = attend_blocks(
            causal_BTHD[row, source_M][None],
            query_BHTD[row, :, source_M][None],
            key_BHTD[row, :, source_M][None],
            value_BHTD[row, :, source_M][None],
            [Block(0, num - size, num)],
            scaling,
            window,
        )
        attended_BTHD[row, source_M[num - size :]] = attended_1MHD[0, num - size :]
    return attended_BTHD, None


transformers.AttentionInterface.register(ATTENTION_NAME, attend)
transformers.AttentionInterface.register(WITH_IMAGES, attend_with_images)


def prepare_to_share(model: Any, max_length: int) -> str | None:
    """Make a whole model on the CPU take rows with shared prompts. Return None, or why it cannot and stays unchanged.

    The model is tried out: two samples that share a prompt must have the same logits as each sample alone.
    """
    return _prepare(model, max_length, _SHARED)


def prepare_to_pack(model: Any, max_length: int) -> str | None:
    """Make a whole model on the CPU take packed rows. Return None, or why it cannot and stays unchanged.

    The model is tried out: two sequences in one row must have the same logits as each sequence alone.
    """
    return _prepare(model, max_length, _PACKED)


def _prepare(model: Any, max_length: int, row: Row) -> str | None:
    config = model.config.get_text_config()
    unstable = unstable_rotation(config, max_length)
    if unstable is not None:
        return f"its rotary embeddings of type {unstable} turn tokens by the length of the longest row"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        return f"it has layers of type {others[0]}"
    before = config._attn_implementation
    told_windows: dict[int, int | None] = {}
    try:
        expected_KV = _logits(model)
        use_attention(model, ATTENTION_NAME)
        found_KV = _logits(model, told_windows, row)
    except Exception as error:  # a custom architecture fails in ways of its own
        reason = f"it takes no attention but its own: {type(error).__name__}: {error}".split("\n")[0]
    else:
        untold = [
            (layer, window)
            for layer, window in enumerate(sliding_windows(config))
            if window is not None and window < max_length and told_windows.get(layer) != window
        ]
        if untold:
            reason = f"layer {untold[0][0]} does not tell its attention that it slides over {untold[0][1]} tokens"
        elif torch.allclose(found_KV, expected_KV, rtol=1e-3, atol=1e-4):
            return None
        else:
            reason = "its tokens meet outside of attention"
    use_attention(model, before)
    return reason


def use_attention(model: Any, name: str) -> None:
    """Set the attention of a model; of its language model alone if it sees, since a tower does not attend causally."""
    model.set_attn_implementation({"text_config": name} if model.config.model_type in VISION else name)


_SAMPLES = np.array([[0, 1, 2, 0], [0, 1, 1, 2]])
_COUNTED = np.array([[False, False, True, True]] * 2)
_CPU = torch.device("cpu")
_SHARED = share_prompts(_SAMPLES, _COUNTED, np.zeros(2, dtype=np.int64), np.array([2, 2]), divisible_by=1, device=_CPU)
_PACKED = pack_row(_SAMPLES, np.array([4, 4]), _COUNTED, divisible_by=1, row_divisible_by=1, device=_CPU)


@torch.no_grad()
def _logits(model: Any, told_windows: dict[int, int | None] | None = None, row: Row | None = None) -> torch.Tensor:
    """Return the logits of the predicting tokens in `_SAMPLES`, ``[K, V]``, from samples or from a row.

    Other models may have a head with the same output everywhere, so their hidden states are returned. With a row,
    `told_windows` collects the window that each layer gives for its sliding attention.
    """
    logits: torch.Tensor
    asked = model if model.can_generate() else model.base_model
    if row is not None:
        inputs = {"input_ids": row.token_ids_1N, "position_ids": row.position_ids_1N, "row": row}
        logits = asked(**inputs, told_windows=told_windows, use_cache=False)[0]
        return logits[0, row.predictor_K]
    logits = asked(input_ids=torch.from_numpy(_SAMPLES), use_cache=False)[0]
    return logits[:, 1:3].flatten(0, 1)
