"""Distributions that are cut off, and sampling masks: the tokens that are left of them.

Shapes: ``B`` rows, ``R`` requests of a step, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from tandem.rollout.engines.slots import EngineSlots
from tandem.samples.sampling_masks import BITS, MaskFormat, Words


def restrict(
    logits_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor, min_p_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logits with every token outside min-p, top-k and top-p at minus infinity.

    The order is vLLM's. Min-p keeps tokens with at least ``min_p`` of the largest probability (Nguyen et al. 2024,
    arXiv:2407.01082). Top-k comes next. Top-p then keeps the smallest set of the most probable tokens with at least
    ``top_p`` probability, renormalised over what is left (Holtzman et al., "The Curious Case of Neural Text
    Degeneration", 2020). `top_k_B` is int64 with 0 for no limit, `top_p_B` float32 above 0 and at most 1, `min_p_B`
    float32 from 0 to 1, None for 0 everywhere. Of equal logits the lower token id ranks first, so that exactly
    ``top_k`` tokens remain; min-p keeps all of them or none.
    """
    if min_p_B is not None:
        least_B1 = logits_BV.amax(dim=-1, keepdim=True) + min_p_B.log()[:, None]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    num_tokens = logits_BV.shape[-1]
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(num_tokens, device=logits_BV.device)
    limit_B = torch.where(top_k_B > 0, top_k_B, num_tokens)
    sorted_BV = sorted_BV.masked_fill(rank_V >= limit_B[:, None], -torch.inf)
    probability_BV = sorted_BV.softmax(dim=-1)
    before_BV = probability_BV.cumsum(dim=-1) - probability_BV
    beyond_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1)
    sorted_BV = sorted_BV.masked_fill(beyond_BV, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)


def masks_of(is_kept_RV: torch.Tensor, mask_format: MaskFormat) -> list[Words]:
    """Return the mask of each request. Usually few tokens are kept or left out, so only their ids leave the device."""
    is_kept_RV = is_kept_RV[:, : mask_format.vocabulary]
    num_kept_R = is_kept_RV.sum(dim=1)
    num_out_R = mask_format.vocabulary - num_kept_R
    takes_out_R = num_out_R < num_kept_R
    num_R = torch.minimum(num_kept_R, num_out_R)
    takes_ids_R = num_R < mask_format.bitmap_words
    is_named_RV = is_kept_RV[takes_ids_R] ^ takes_out_R[takes_ids_R][:, None]
    rows, ids = (part.int().cpu().numpy() for part in is_named_RV.nonzero().T)
    ids = np.where(takes_out_R[takes_ids_R].cpu().numpy()[rows], -1 - ids, ids).astype(np.int32)
    ends = np.cumsum(num_R[takes_ids_R].cpu().numpy())[:-1]
    lists = iter(np.split(ids, ends))
    bitmaps = iter(_bitmaps(is_kept_RV[~takes_ids_R].cpu().numpy(), mask_format))
    return [next(lists) if has_ids else next(bitmaps) for has_ids in takes_ids_R.tolist()]


def _bitmaps(is_kept_RV: np.ndarray, mask_format: MaskFormat) -> Words:
    bytes_RX = np.packbits(is_kept_RV, axis=1, bitorder="little")
    missing = mask_format.bitmap_words * BITS // 8 - bytes_RX.shape[1]
    return np.pad(bytes_RX, ((0, 0), (0, missing))).view("<i4")


def note_masks(slots: EngineSlots, mask_format: MaskFormat, logits_BV: torch.Tensor) -> None:
    """Note the masks from which the next tokens of running slots are drawn, by their logits; not of external
    requests."""
    rows = [row for row, sequence in enumerate(slots.sequences) if not sequence.request.is_external]
    for row, mask in zip(rows, masks_of(logits_BV[rows] > -torch.inf, mask_format), strict=True):
        slots.sequences[row].masks.append(mask)
