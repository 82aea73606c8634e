"""Sample one token per row, with its log-probability in the distribution left by what is forbidden.

Randomness is counter-based: the uniform number behind token ``i`` of a response is a hash of the request's seed and
``i``. It depends neither on other requests nor on any state of this process.

Of sequences that a response may not contain, the last token is masked where the response ends with the others. Tokens
are then drawn from what remains, renormalised, and their log-probabilities are of that distribution. An engine that was
never asked for any does not wrap its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.rollout.engines.masks import restrict
from tandem.rollout.engines.slots import EngineSlots

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
        row_R = np.flatnonzero(is_restricted_B)
        top_k_R, top_p_R, min_p_R = (torch.from_numpy(array[row_R]).to(device) for array in (top_k_B, top_p_B, min_p_B))
        row_index_R = torch.from_numpy(row_R).to(device)
        restricted_RV = restrict(
            scaled_BV[row_index_R], top_k_R, top_p_R, min_p_R if (min_p_B[row_R] > 0).any() else None
        )
        scaled_BV = scaled_BV.index_copy(0, row_index_R, restricted_RV)
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
