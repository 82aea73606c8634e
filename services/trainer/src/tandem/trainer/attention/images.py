"""Attention of families whose images attend in both directions (`tandem.samples.images.blocks`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from tandem.samples.images.blocks import ImageTokens, attend_blocks
from tandem.trainer.attention.rows import attend
from tandem.trainer.batching.images import ImageBlock

WITH_IMAGES = "tandem_rows_with_images"


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
            [ImageTokens(0, num - size, num)],
            scaling,
            window,
        )
        attended_BTHD[row, source_M[num - size :]] = attended_1MHD[0, num - size :]
    return attended_BTHD, None


transformers.AttentionInterface.register(WITH_IMAGES, attend_with_images)
