"""Attention in chunks of positions, and modules that ask a cache where their tokens stand (Llama 4).

A token attends to the earlier ones of its own chunk: those with the same position divided by the chunk's size, rounded
down. Layers without rotary embeddings scale their queries by position (Nakanishi 2025, arXiv:2501.19399). They count
positions from what a cache says came before; in a row of several sequences they are told them by `PositionCache`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

CHUNKED_TYPE = "chunked_attention"
"""The type of such layers in Transformers."""
_LENGTH_CALL = "get_seq_length"


def find_chunk_sizes(config: Any) -> tuple[int | None, ...]:
    """Return the positions in a chunk of each layer, from a model's text configuration in Transformers.

    None for a layer that is not in chunks.
    """
    types = getattr(config, "layer_types", None) or ()
    return tuple(int(config.attention_chunk_size) if each == CHUNKED_TYPE else None for each in types)


def find_chunk_size(module: Any) -> int | None:
    """Return the positions in a chunk of a module of attention; None if it is not in chunks."""
    is_chunked = module.config.layer_types[module.layer_idx] == CHUNKED_TYPE
    return int(module.config.attention_chunk_size) if is_chunked else None


def split_segments(segments: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return segments of equally many queries and keys, divided into chunks."""
    sizes = [min(size, length - first) for length, _ in segments for first in range(0, length, size)]
    return [(each, each) for each in sizes]


class PositionCache:
    """In place of a cache for a row of several sequences: it says how many tokens came before each, and keeps none."""

    def __init__(self, position_1N: torch.Tensor) -> None:
        """Stand for a row whose tokens have these positions in their own sequences."""
        index_N = torch.arange(position_1N.shape[1], device=position_1N.device)
        self._before_N = position_1N[0] - index_N

    def get_seq_length(self, layer: int = 0) -> torch.Tensor:
        """Return what to add to the place of each token in the row, ``[N]``."""
        return self._before_N

    def update(
        self, key_1HND: torch.Tensor, value_1HND: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as they are."""
        return key_1HND, value_1HND


FindPositions = Callable[[dict[str, Any]], torch.Tensor | None]
"""A function of a module's keyword arguments: the positions ``[1, N]`` of a row, None if there is no such row."""


def give_positions(model: torch.nn.Module, find_positions: FindPositions) -> None:
    """Have modules of attention that ask a cache for positions learn them from the row that they are given."""

    def add(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        position_1N = find_positions(kwargs)
        return None if position_1N is None else (args, kwargs | {"cache": PositionCache(position_1N)})

    for module in model.modules():
        if hasattr(module, "layer_idx") and _asks_length(type(module)):
            module.register_forward_pre_hook(add, with_kwargs=True)


def _asks_length(module_class: Any) -> bool:
    forward = inspect.unwrap(module_class.forward)
    return _LENGTH_CALL in forward.__code__.co_names
