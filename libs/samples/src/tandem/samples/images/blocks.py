"""Attention in blocks: tokens of one image attend to each other in both directions, as in Gemma 3.

Shapes: ``N`` tokens of a row; ``H`` query heads, ``G`` key heads; ``D`` elements of a head; ``B`` tokens of a block;
``M`` tokens of its sequence up to the block's end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F


class ImageTokens(NamedTuple):
    """The tokens of an image within a row whose sequence lies there in one piece."""

    begin: int
    """Place of the first token of its sequence."""
    start: int
    """Place of its own first token."""
    stop: int
    """Place after its last token."""


def attend_blocks(
    output_1NHD: torch.Tensor,
    query_1HND: torch.Tensor,
    key_1GND: torch.Tensor,
    value_1GND: torch.Tensor,
    blocks: Iterable[ImageTokens],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the output of causal attention with the tokens of blocks computed anew.

    A token of a block attends to all of its block besides what a layer with this `window`, None for no limit, lets it
    see before.
    """
    output_1NHD = output_1NHD.clone()
    for begin, start, stop in blocks:
        block, seen = slice(start, stop), slice(begin, stop)
        place_B1 = torch.arange(start, stop, device=query_1HND.device)[:, None]
        place_M = torch.arange(begin, stop, device=query_1HND.device)
        is_before_BM = place_M <= place_B1
        if window is not None:
            is_before_BM &= place_M > place_B1 - window
        attended_1HBD = F.scaled_dot_product_attention(
            query_1HND[:, :, block],
            key_1GND[:, :, seen],
            value_1GND[:, :, seen],
            attn_mask=is_before_BM | (place_M >= start),
            scale=scaling,
            enable_gqa=query_1HND.shape[1] != key_1GND.shape[1],
        )
        output_1NHD[:, block] = attended_1HBD.transpose(1, 2)
    return output_1NHD
