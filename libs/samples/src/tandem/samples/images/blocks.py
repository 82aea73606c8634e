"""Attention among the tokens of an image in both directions, where other tokens attend causally. Uses torch.

Causal attention runs for all tokens as for text, with its fast kernels. Then the queries of each image are computed
anew: they see the tokens of their sequence that causal attention shows them, and the whole image.

Shapes: ``B`` rows of ``T`` tokens, ``H`` heads, ``G`` of them with keys and values, ``D`` dimensions; ``M`` keys that a
block sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F


class ImageBlock(NamedTuple):
    """The tokens of an image, side by side in a row."""

    row: int
    first: int
    """Index of its first token in the row."""
    size: int
    """Number of its tokens."""
    key_M: torch.Tensor
    """int64; the tokens in the row of its sequence, in order, up to its own last one."""


def attend_blocks(
    attended_BTHD: torch.Tensor,
    query_BHTD: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    blocks: Sequence[ImageBlock],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return what causal attention gives, with that of images in its place. `window` is that of sliding attention."""
    found = attended_BTHD.clone() if blocks else attended_BTHD
    is_grouped = query_BHTD.shape[1] != key_BGTD.shape[1]
    for block in blocks:
        row, key_M = slice(block.row, block.row + 1), block.key_M
        queries = slice(block.first, block.first + block.size)
        place_M = torch.arange(len(key_M), device=key_M.device)
        own_Q = place_M[-block.size :, None]
        in_image_M = place_M >= len(key_M) - block.size
        seen_QM = place_M <= own_Q
        if window is not None:
            seen_QM &= place_M > own_Q - window
        attended_1HQD = F.scaled_dot_product_attention(
            query_BHTD[row, :, queries],
            key_BGTD[row, :, key_M],
            value_BGTD[row, :, key_M],
            attn_mask=seen_QM | in_image_M,
            scale=scaling,
            enable_gqa=is_grouped,
        )
        found[row, queries] = attended_1HQD.transpose(1, 2)
    return found
