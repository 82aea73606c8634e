"""Generalised advantage estimation over the tokens of responses.

Shapes: ``T`` tokens of a ragged batch in ``S`` sequences; ``K`` valid tokens of the longest response, from the last one
    backward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.config.schema import GaeEstimator
from tandem.samples.batch import Float32s

Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]


def token_rewards(rewards_S: Float32s, valid_T: Bools, lengths_S: NDArray[np.int32]) -> Float32s:
    """Return the reward of each sequence at its last valid token, and zero at all others."""
    rewards_T = np.zeros(len(valid_T), dtype=np.float32)
    response = _Responses(valid_T, lengths_S)
    rewards_T[response.token_C[response.back_C == 0]] = rewards_S[response.num_S > 0]
    return rewards_T


def advantages_and_returns(
    rewards_T: Float32s, values_T: Float32s, valid_T: Bools, lengths_S: NDArray[np.int32], settings: GaeEstimator
) -> tuple[Float32s, Float32s]:
    """Return the advantage and the return of each valid token, zeros elsewhere.

    The valid tokens of a sequence are its steps, without the environment's tokens between them. Let ``r_t`` be the
    reward of a step and ``V_t`` the value before it, with zero after the last step. Then ``delta_t = r_t + gamma
    V_{t+1} - V_t`` and ``A_t = sum over l of (gamma lambda)^l delta_{t+l}`` (Schulman et al. 2015, arXiv:1506.02438,
    equations 10 and 16). The return is ``A_t + V_t``. Each may have its own lambda (VAPO, Yue et al. 2025,
    arXiv:2504.05118, equations 6 and 7).
    """
    responses = _Responses(valid_T, lengths_S)
    of_policy = _policy_lambdas(responses.num_S, settings)
    of_value = settings.gae_lambda if settings.gae_lambda_value is None else settings.gae_lambda_value
    lambdas_S = np.full(len(lengths_S), of_value, dtype=np.float64)
    target_T = responses.estimate(rewards_T, values_T, settings.gae_gamma, lambdas_S)
    returns_T = np.where(valid_T, target_T + values_T, 0.0).astype(np.float32)
    same = np.array_equal(of_policy, lambdas_S)
    advantages_T = target_T if same else responses.estimate(rewards_T, values_T, settings.gae_gamma, of_policy)
    return advantages_T.astype(np.float32), returns_T


def _policy_lambdas(num_S: NDArray[np.int64], settings: GaeEstimator) -> Float64s:
    """Return each sequence's lambda for the policy's advantages. VAPO's grows with the response (equation 8)."""
    if settings.length_adaptive_alpha > 0:
        return np.asarray(1.0 - 1.0 / np.maximum(1.0, settings.length_adaptive_alpha * num_S))
    policy_lambda = settings.gae_lambda_policy
    return np.full(len(num_S), settings.gae_lambda if policy_lambda is None else policy_lambda, dtype=np.float64)


class _Responses:
    """The ``C`` valid tokens of a batch, by sequence and by the number of valid tokens after them."""

    def __init__(self, valid_T: Bools, lengths_S: NDArray[np.int32]) -> None:
        self._valid_T = valid_T
        self.token_C = np.flatnonzero(valid_T)
        self._sequence_C = np.repeat(np.arange(len(lengths_S)), lengths_S)[self.token_C]
        self.num_S = np.bincount(self._sequence_C, minlength=len(lengths_S))
        self.back_C = (np.cumsum(self.num_S) - 1)[self._sequence_C] - np.arange(len(self.token_C))

    def estimate(self, rewards_T: Float32s, values_T: Float32s, gamma: float, lambdas_S: Float64s) -> Float64s:
        """Return ``A_t`` of each valid token, zeros elsewhere, for all sequences at once from their ends."""
        rewards_KS, values_KS = self._backward(rewards_T), self._backward(values_T)
        advantages_KS = np.zeros_like(values_KS)
        next_advantage_S = next_value_S = np.zeros(len(self.num_S))
        for back in range(len(values_KS)):
            delta_S = rewards_KS[back] + gamma * next_value_S - values_KS[back]
            next_advantage_S = advantages_KS[back] = delta_S + gamma * lambdas_S * next_advantage_S
            next_value_S = values_KS[back]
        found_T = np.zeros(len(self._valid_T))
        found_T[self.token_C] = advantages_KS[self.back_C, self._sequence_C]
        return found_T

    def _backward(self, numbers_T: Float32s) -> Float64s:
        numbers_KS = np.zeros((self.num_S.max(initial=0), len(self.num_S)))
        numbers_KS[self.back_C, self._sequence_C] = numbers_T[self.token_C]
        return numbers_KS
