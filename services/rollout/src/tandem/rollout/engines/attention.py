"""Attention over slots: where the engine's key-value cache meets a Hugging Face model.

A step feeds the model one row of tokens, ``[1, N]``: first the newest token of every running sequence, then the prompts
that join, end to end. Linear layers see no padding and do one matrix product each. Attention is the only layer where
tokens meet. `slot_attention` replaces it through `transformers.AttentionInterface`; the `AttentionStep` that travels
beside the tokens tells which of them belong together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray

from tandem.common.attention.chunks import find_chunk_size, split_segments
from tandem.common.attention.segments import attend, attend_capped
from tandem.common.errors import ModelError

ATTENTION_NAME = "tandem_slots"
BLOCKS_ATTENTION_NAME = "tandem_slots_with_blocks"
"""Name for models whose images are blocks of attention in both directions."""
CHUNKS_ATTENTION_NAME = "tandem_slots_in_chunks"
"""Name for models some of whose layers attend within chunks."""
_HUGE_PAGES_UP_TO = 2**24
"""Bytes of a layer's keys up to which huge pages are used. They are allocated five times as fast after every sleep,
but take memory even where only a few tokens lie. A small cache can afford that."""


class NotCausalError(ModelError):
    """A model attends to later tokens."""


class KeyValueCache:
    """Keys and values of every slot and layer, ``[S, H, L, D]`` each: slot, key-value head, position, head dimension.

    A layer's memory is allocated when it first stores something, in the shapes of the model's own keys and values, so
    that any head layout works.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._num_slots = num_slots
        self._max_length = max_length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory taken so far."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    @property
    def num_layers(self) -> int:
        """Layers that have stored something."""
        return len(self._layers)

    def layer(self, index: int, key_1HND: torch.Tensor, value_1HND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[S, H, L, D]`` of a layer, made like `key_1HND` and `value_1HND` if it is new."""
        cached = self._layers.get(index)
        if cached is None:
            cached = self._layers[index] = (self._allocate(key_1HND), self._allocate(value_1HND))
        return cached

    def move(self, source_M: NDArray[np.int64], destination_M: NDArray[np.int64], length: int) -> None:
        """Copy the first `length` positions of each source slot to its destination slot, in every layer."""
        for keys_SHLD, values_SHLD in self._layers.values():
            for cached_SHLD in (keys_SHLD, values_SHLD):
                source_index_M = torch.from_numpy(source_M).to(cached_SHLD.device)
                destination_index_M = torch.from_numpy(destination_M).to(cached_SHLD.device)
                window_SHLD = cached_SHLD[:, :, :length]
                window_SHLD[destination_index_M] = window_SHLD[source_index_M]

    def release(self) -> None:
        """Give all memory back; the next step allocates it again."""
        self._layers.clear()

    def _allocate(self, like_1HND: torch.Tensor) -> torch.Tensor:
        _, num_heads, _, head_dim = like_1HND.shape
        shape = (self._num_slots, num_heads, self._max_length, head_dim)
        # Zeros, not whatever the memory held: positions beyond a row's length are multiplied by an attention weight
        # of zero, and zero times NaN would be NaN.
        if like_1HND.device.type != "cpu":
            return torch.zeros(shape, dtype=like_1HND.dtype, device=like_1HND.device)
        # Straight from the operating system: zero, taken page by page as sequences grow, and all given back at the end.
        num_bytes = math.prod(shape) * like_1HND.element_size()
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes <= _HUGE_PAGES_UP_TO:
            with contextlib.suppress(OSError):  # kernels without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=like_1HND.dtype).view(shape)


@dataclasses.dataclass(frozen=True)
class SlotPrompt:
    """A prompt within a step's tokens, and the slots that start from it."""

    start: int
    """Index of its first token in the step's tokens."""
    length: int
    first_slot: int
    num_slots: int
    """Samples of one prompt group lie side by side and share one pass over the prompt."""


@dataclasses.dataclass(frozen=True)
class AttentionStep:
    """The sequences in a row ``[1, N]``: `num_running` of one new token each, then the prompts."""

    cache: KeyValueCache
    num_running: int
    slot_R: torch.Tensor
    """The running slots, 0 to R - 1."""
    position_R: torch.Tensor
    """Position of each running slot's new token."""
    length: int
    """Positions that attention of the running slots reads: the length of the longest slot, its new token included."""
    mask_R11L: torch.Tensor
    """Mask to add to scores: 0 where a running slot has a token, and minus infinity beyond its end."""
    prompts: tuple[SlotPrompt, ...]
    window_masks: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The same masks by width of a layer's sliding window, with minus infinity before the window; made once a step."""
    chunk_masks: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The same masks by size of a layer's chunks, with minus infinity before the chunk; made once a step."""

    def mask_of(self, window: int) -> torch.Tensor:
        """Return the mask of a layer with this sliding window."""
        if window >= self.length:
            return self.mask_R11L
        if window not in self.window_masks:
            key_L = torch.arange(self.length, device=self.position_R.device)
            is_before_RL = key_L <= self.position_R[:, None] - window
            self.window_masks[window] = self.mask_R11L.masked_fill(is_before_RL[:, None, None, :], -torch.inf)
        return self.window_masks[window]

    def mask_of_chunk(self, size: int) -> torch.Tensor:
        """Return the mask of a layer with chunks of this size."""
        if size not in self.chunk_masks:
            key_L = torch.arange(self.length, device=self.position_R.device)
            is_before_RL = key_L < (self.position_R // size * size)[:, None]
            self.chunk_masks[size] = self.mask_R11L.masked_fill(is_before_RL[:, None, None, :], -torch.inf)
        return self.chunk_masks[size]

    def positions(self) -> torch.Tensor:
        """Return the position of each token of the row within its sequence, ``[1, N]``."""
        prompts = [torch.arange(prompt.length, device=self.position_R.device) for prompt in self.prompts]
        return torch.cat((self.position_R, *prompts))[None]


def slot_attention(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
    slot_step: AttentionStep | None = None,
    told_windows: dict[int, int | None] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values in the cache and attend from each token to its own sequence.

    The signature is that of `transformers.AttentionInterface`, which calls sinks `s_aux`; returns ``[1, N, H, D]``.
    `softcap` limits scores; `chunk_size` comes from `slot_attention_in_chunks`. `told_windows` collects the sliding
    windows that layers report. Raises `ModelError` if the architecture's attention differs from scaled dot products,
    when a model is tried out (`tandem.rollout.engines.skeleton`).
    """
    if slot_step is None or told_windows is not None:  # the engine tries the model out
        _refuse_unknown(module, kwargs, attention_mask, passes_on=slot_step is not None)
    assert slot_step is not None, "refused"
    step, layer = slot_step, int(module.layer_idx)  # type: ignore[arg-type]
    if told_windows is not None:
        if layer in told_windows:
            raise ModelError(f"{type(module).__name__} attends twice in a layer")
        told_windows[layer] = sliding_window
    keys_SHLD, values_SHLD = step.cache.layer(layer, key_1HND, value_1HND)
    outputs_NHD: list[torch.Tensor] = []
    if step.num_running:
        num = step.num_running
        keys_SHLD[step.slot_R, :, step.position_R] = key_1HND[0, :, :num].transpose(0, 1)
        values_SHLD[step.slot_R, :, step.position_R] = value_1HND[0, :, :num].transpose(0, 1)
        # Query heads that share a key-value head become its query positions, so that no key is copied.
        num_heads, head_dim = query_1HND.shape[1], query_1HND.shape[3]
        query_RHGD = query_1HND[0, :, :num].transpose(0, 1).reshape(num, keys_SHLD.shape[1], -1, head_dim)
        keys_RHLD, values_RHLD = keys_SHLD[:num, :, : step.length], values_SHLD[:num, :, : step.length]
        mask_R11L = step.mask_R11L if sliding_window is None else step.mask_of(sliding_window)
        if chunk_size is not None:
            mask_R11L = step.mask_of_chunk(chunk_size)
        if softcap is not None:
            query_RH1D, mask_R111L = query_1HND[0, :, :num].transpose(0, 1)[:, :, None], mask_R11L[:, None]
            attended_RHGD = attend_capped(query_RH1D, keys_RHLD, values_RHLD, mask_R111L, scaling, softcap, s_aux)
        else:
            attended_RHGD = _attend_newest(query_RHGD, keys_RHLD, values_RHLD, mask_R11L, scaling, s_aux)
        outputs_NHD.append(attended_RHGD.reshape(num, num_heads, -1))
    for prompt in step.prompts:
        tokens = slice(prompt.start, prompt.start + prompt.length)
        slots = slice(prompt.first_slot, prompt.first_slot + prompt.num_slots)
        key_1HTD, value_1HTD = key_1HND[:, :, tokens], value_1HND[:, :, tokens]
        keys_SHLD[slots, :, : prompt.length] = key_1HTD
        values_SHLD[slots, :, : prompt.length] = value_1HTD
        query_THD = query_1HND[0, :, tokens].transpose(0, 1)
        key_THD, value_THD = key_1HTD[0].transpose(0, 1), value_1HTD[0].transpose(0, 1)
        segments = [(prompt.length, prompt.length)]
        if chunk_size is not None:
            segments = split_segments(segments, chunk_size)
        outputs_NHD.append(attend(query_THD, key_THD, value_THD, segments, scaling, sliding_window, s_aux, softcap))
    output_NHD = outputs_NHD[0] if len(outputs_NHD) == 1 else torch.cat(outputs_NHD)
    return output_NHD[None].contiguous(), None  # some models view it as they would the library's own


def slot_attention_in_chunks(module: Any, *tensors: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attend as `slot_attention` does, within chunks where the layer's type says so."""
    kwargs["chunk_size"] = find_chunk_size(module)
    return slot_attention(module, *tensors, **kwargs)


def _refuse_unknown(
    module: torch.nn.Module, arguments: Mapping[str, Any], mask: torch.Tensor | None, *, passes_on: bool
) -> None:
    """Raise `ModelError` for an architecture whose attention is another."""
    name = type(module).__name__
    if getattr(module, "is_causal", True) is False:
        raise NotCausalError(f"the embedded engine cannot run this architecture: the attention of {name} is not causal")
    if arguments.get("position_bias") is not None:
        raise ModelError(f"{name} adds a bias of positions")
    if mask is not None:  # the library makes none for attention of this name
        raise ModelError(f"{name} adds to its scores by a mask of its own")
    if not passes_on:
        raise ModelError(f"{name} passes no arguments on to its attention")


def _attend_newest(
    query_RHGD: torch.Tensor,
    keys_RHLD: torch.Tensor,
    values_RHLD: torch.Tensor,
    mask_R11L: torch.Tensor,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from the newest token of each running slot to the tokens before it, and to the sinks of its heads.

    With a handful of queries a head, torch's fused attention is slower on a CPU than two products and a softmax, twice
    with two threads (`benchmarks/test_generation.py`). In bfloat16 it rounds less, and on a GPU it is faster.
    """
    if sinks is None and (query_RHGD.dtype != torch.float32 or query_RHGD.device.type != "cpu"):
        return F.scaled_dot_product_attention(query_RHGD, keys_RHLD, values_RHLD, attn_mask=mask_R11L, scale=scaling)
    num_rows, num_heads, num_each, head_dim = query_RHGD.shape
    scores_RHGL = (query_RHGD * (head_dim**-0.5 if scaling is None else scaling)) @ keys_RHLD.transpose(2, 3)
    scores_RHGL += mask_R11L
    if sinks is None:
        return scores_RHGL.softmax(dim=3) @ values_RHLD
    sinks_RHG1 = sinks.view(num_heads, num_each, 1).to(scores_RHGL.dtype).expand(num_rows, -1, -1, -1)
    weights_RHGL = torch.cat((scores_RHGL, sinks_RHG1), dim=3).softmax(dim=3, dtype=torch.float32)[..., :-1]
    return weights_RHGL.to(values_RHLD.dtype) @ values_RHLD


transformers.AttentionInterface.register(ATTENTION_NAME, slot_attention)
transformers.AttentionInterface.register(CHUNKS_ATTENTION_NAME, slot_attention_in_chunks)
