"""Distributions that are cut off, and sampling masks: the tokens that are left of them.

Shapes: ``B`` rows, ``R`` requests of a step or rows of those, ``D`` rows whose cut is decided,
``C`` candidates, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from tandem.rollout.engines.slots import EngineSlots
from tandem.samples.sampling_masks import BITS, MaskFormat, Words

NUM_CANDIDATES = (1024, 8192)
"""How many of the likeliest tokens a cut is looked for among, before all are sorted."""


def restrict(
    logits_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor, min_p_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logits with every token outside min-p, top-k and top-p at minus infinity.

    The order is vLLM's. Min-p keeps tokens with at least ``min_p`` of the largest probability (Nguyen et al. 2024,
    arXiv:2407.01082). Top-k comes next. Top-p then keeps the smallest set of the most probable tokens with at least
    ``top_p`` probability, renormalised over what is left (Holtzman et al., "The Curious Case of Neural Text
    Degeneration", 2020). `top_k_B` is int64 with 0 for no limit, `top_p_B` float32 above 0 and at most 1, `min_p_B`
    float32 from 0 to 1, None for 0 everywhere. Of equal logits the lower token id ranks first, so that exactly
    ``top_k`` tokens remain; min-p keeps all of them or none. A row without a finite largest logit stays as it is.
    """
    if min_p_B is not None:
        least_B1 = logits_BV.amax(dim=-1, keepdim=True) + min_p_B.log()[:, None]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    num_tokens = logits_BV.shape[-1]
    limit_B = torch.where(top_k_B > 0, top_k_B, num_tokens).clamp(max=num_tokens)
    is_open_B = ((limit_B < num_tokens) | (top_p_B < 1)) & logits_BV.amax(dim=-1).isfinite()
    restricted_BV = logits_BV.clone()
    if not is_open_B.any():  # only min-p cuts, or nothing does
        return restricted_BV
    probability_BV = logits_BV.softmax(dim=-1)
    for num_candidates in (*_num_candidates(logits_BV), num_tokens):
        row_R = is_open_B.nonzero()[:, 0]
        if not len(row_R):
            break
        inputs = logits_BV[row_R], probability_BV[row_R], limit_B[row_R], top_p_B[row_R]
        cut_DV, is_decided_R = _cut(*inputs, num_candidates)
        restricted_BV[row_R[is_decided_R]] = cut_DV
        is_open_B[row_R[is_decided_R]] = False
    return restricted_BV


def _num_candidates(logits_BV: torch.Tensor) -> tuple[int, ...]:
    """Return how many candidates to try: fewer than an eighth of the tokens, and none on a GPU, which sorts fast."""
    if logits_BV.device.type != "cpu":
        return ()
    return tuple(num for num in NUM_CANDIDATES if 8 * num <= logits_BV.shape[-1])


def _cut(
    logits_RV: torch.Tensor,
    probability_RV: torch.Tensor,
    limit_R: torch.Tensor,
    top_p_R: torch.Tensor,
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits after the cut of rows whose cut lies among the likeliest candidates, and which rows these are.

    All sums are over a row's tokens from the likeliest on, one after another, so that they do not depend on the number
    of candidates.
    """
    num_tokens = logits_RV.shape[-1]
    value_RC, id_RC = logits_RV.topk(num_candidates, dim=-1) if num_candidates < num_tokens else _sort(logits_RV)
    cumulative_RC = probability_RV.gather(-1, id_RC).cumsum(dim=-1, dtype=torch.float64)
    last_R1 = (limit_R.clamp(max=num_candidates) - 1)[:, None]
    total_R1 = torch.where(limit_R[:, None] < num_tokens, cumulative_RC.gather(-1, last_R1), 1.0)
    before_RC = (pad(cumulative_RC[:, :-1], (1, 0)) / total_R1).float()
    is_beyond_RC = (before_RC >= top_p_R[:, None]) & (top_p_R[:, None] < 1)
    is_beyond_RC |= torch.arange(num_candidates, device=logits_RV.device) >= limit_R[:, None]
    num_kept_R = num_candidates - is_beyond_RC.sum(dim=-1)
    is_decided_R = ((limit_R <= num_candidates) | (limit_R == num_tokens)) & (num_kept_R < num_candidates)
    is_decided_R |= num_candidates == num_tokens
    value_DC, num_kept_D1 = value_RC[is_decided_R], num_kept_R[is_decided_R, None]
    least_D1 = value_DC.gather(-1, num_kept_D1 - 1)
    num_equal_D1 = num_kept_D1 - (value_DC > least_D1).sum(dim=-1, keepdim=True)
    return _keep(logits_RV[is_decided_R], least_D1, num_equal_D1), is_decided_R


def _sort(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value_RV, id_RV = logits_RV.sort(dim=-1, descending=True)
    return value_RV, id_RV


def _keep(logits_RV: torch.Tensor, least_R1: torch.Tensor, num_equal_R1: torch.Tensor) -> torch.Tensor:
    """Keep the logits above the least, and of those that equal it so many of the lowest ids."""
    kept_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
    is_equal_RV = logits_RV == least_R1
    row_T = (is_equal_RV.sum(dim=-1, keepdim=True) > num_equal_R1).nonzero()[:, 0]
    if len(row_T):
        is_equal_TV = is_equal_RV[row_T]
        is_left_out_TV = is_equal_TV & (is_equal_TV.cumsum(dim=-1) > num_equal_R1[row_T])
        kept_RV[row_T] = kept_RV[row_T].masked_fill(is_left_out_TV, -torch.inf)
    return kept_RV


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
