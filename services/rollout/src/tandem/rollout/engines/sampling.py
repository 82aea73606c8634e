"""Sample one token per row, with its log-probability in what a cut leaves, and masks of what that is.

Randomness is counter-based: the uniform number behind token ``i`` of a response is a hash of the request's seed and
``i``. It depends neither on other requests nor on any state of this process.

Of sequences that a response may not contain, the last token is masked where the response ends with the others. Tokens
are then drawn from what remains, renormalised, and their log-probabilities are of that distribution. An engine that was
never asked for any does not wrap its forward pass.

Shapes: ``B`` rows, ``R`` requests of a step or rows of those, ``D`` rows whose cut is decided,
``C`` candidates, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
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


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def forbidden_next(sequences: Sequence[Sequence[int]], made_ids: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of the sequences after these tokens of the response."""
    response_ids = tuple(made_ids)
    return [last for *before, last in sequences if response_ids[len(response_ids) - len(before) :] == tuple(before)]


class ForbiddingForward:
    """A forward pass whose logits of forbidden tokens are minus infinity."""

    def __init__(self, forward: Callable[[], torch.Tensor], slots: EngineSlots) -> None:
        """`forward` returns a row of logits for each running sequence of `slots`."""
        self._forward = forward
        self._slots = slots

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        """Return the logits ``[R, V]`` from which the next tokens are drawn."""
        logits_RV = self._forward()
        for row, sequence in enumerate(self._slots.sequences):
            sequences = sequence.request.sampling.bad_token_ids
            if sequences:
                length = max(map(len, sequences)) - 1
                forbidden_ids = forbidden_next(sequences, self._slots.newest(row, length))
                logits_RV[row, forbidden_ids] = -torch.inf
        return logits_RV


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit words: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniforms(seed_B: NDArray[np.uint64], index_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1), a function of seed and token index alone: element ``i`` of the seed's stream.

    48 bits, so that a number times a total is below the total in float64. Neighbouring seeds give unrelated streams
    because the seed is mixed before the counter is added.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        start_B = _mix(seed_B + _GOLDEN_GAMMA)
        state_B = _mix(start_B + (index_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)
    return (state_B >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _restrict_rows(
    scaled_BV: torch.Tensor,
    row_R: NDArray[np.int64],
    top_k_B: NDArray[np.int64],
    top_p_B: NDArray[np.float32],
    min_p_B: NDArray[np.float32],
) -> torch.Tensor:
    """Return the logits, those of some rows restricted."""
    device = scaled_BV.device
    top_k_R, top_p_R, min_p_R = (torch.from_numpy(array[row_R]).to(device) for array in (top_k_B, top_p_B, min_p_B))
    row_index_R = torch.from_numpy(row_R).to(device)
    has_min_p = (min_p_B[row_R] > 0).any()
    restricted_RV = restrict(scaled_BV[row_index_R], top_k_R, top_p_R, min_p_R if has_min_p else None)
    return scaled_BV.index_copy(0, row_index_R, restricted_RV)


def draw(
    logits_BV: torch.Tensor,
    uniform_B: NDArray[np.float64],
    temperature_B: NDArray[np.float32],
    top_k_B: NDArray[np.int64],
    top_p_B: NDArray[np.float32],
    min_p_B: NDArray[np.float32] | None = None,
    note: Callable[[torch.Tensor], None] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw a token per row by inverting the cumulative distribution at `uniform_B`.

    The distribution is ``softmax(restrict(logits / temperature))``. At temperature 0 it is the point mass on the
    largest logit, with log-probability 0. Returns token ids and log-probabilities. A row of logits that are not finite
    gives a log-probability that is not finite. `note` is called with the restricted logits.
    """
    device = logits_BV.device
    greedy_B = temperature_B == 0
    scaled_BV = logits_BV.float()
    if (temperature_B != 1).any():
        divisor_B = np.where(greedy_B, np.float32(1), temperature_B)
        scaled_BV = scaled_BV / torch.from_numpy(divisor_B).to(device)[:, None]
    min_p_B = np.zeros_like(top_p_B) if min_p_B is None else min_p_B
    is_restricted_B = ((top_k_B > 0) & (top_k_B < logits_BV.shape[-1])) | (top_p_B < 1) | (min_p_B > 0)
    if is_restricted_B.any():
        scaled_BV = _restrict_rows(scaled_BV, np.flatnonzero(is_restricted_B), top_k_B, top_p_B, min_p_B)
    if note is not None:
        note(scaled_BV)
    logprob_BV = scaled_BV.log_softmax(dim=-1)
    # float64, so that summing a large vocabulary does not shift the boundaries between tokens. `right` skips tokens of
    # probability zero: their cumulative sum equals their predecessor's.
    cumulative_BV = logprob_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    target_B1 = torch.from_numpy(uniform_B).to(device)[:, None] * cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    if greedy_B.any():
        greedy_index_B = torch.from_numpy(greedy_B).to(device)
        token_B1 = torch.where(greedy_index_B[:, None], scaled_BV.argmax(dim=-1, keepdim=True), token_B1)
    logprob_B = logprob_BV.gather(-1, token_B1).squeeze(-1).cpu().numpy()
    # Times zero rather than zero, so that a NaN stays visible.
    logprobs_B: NDArray[np.float32] = np.where(greedy_B, np.abs(logprob_B * np.float32(0)), logprob_B)
    tokens_B: NDArray[np.int64] = token_B1.squeeze(-1).cpu().numpy()
    return tokens_B, logprobs_B
