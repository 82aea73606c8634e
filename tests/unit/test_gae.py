"""Generalised advantages: closed forms, and the papers' sums written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tandem.config.schema import GaeEstimator
from tandem.trainer.advantages import advantages_and_returns, explained_variance, token_rewards

Numbers = NDArray[np.float32]

LENGTHS = np.array([5, 1, 7, 4], dtype=np.int32)
COUNTED = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1], dtype=np.bool_)
"""A response of three tokens, a sequence where none counts, two turns with an environment's words between them, and a
response of one token."""


def numbers(seed: int = 0) -> tuple[Numbers, Numbers]:
    """Return rewards and values of all tokens, those that do not count too: they must not matter."""
    random = np.random.default_rng(seed)
    rewards_T, values_T = random.normal(size=(2, len(COUNTED)))
    return rewards_T.astype(np.float32), values_T.astype(np.float32)


def plain(rewards_T: Numbers, values_T: Numbers, gamma: float, lambdas: float | NDArray[np.float64]) -> Numbers:
    """Equation 16 of Schulman et al. 2015, a sum for each token."""
    found_T = np.zeros(len(COUNTED))
    lambdas_S = np.broadcast_to(lambdas, len(LENGTHS))
    for sequence, (length, end) in enumerate(zip(LENGTHS, np.cumsum(LENGTHS), strict=True)):
        tokens = [token for token in range(end - length, end) if COUNTED[token]]
        values = [*(float(values_T[token]) for token in tokens), 0.0]
        deltas = [float(rewards_T[t]) + gamma * values[i + 1] - values[i] for i, t in enumerate(tokens)]
        for first, token in enumerate(tokens):
            weights = (gamma * lambdas_S[sequence]) ** np.arange(len(tokens) - first)
            found_T[token] = float(np.dot(weights, deltas[first:]))
    return found_T.astype(np.float32)


def test_the_reward_of_a_sequence_is_that_of_its_last_counted_token() -> None:
    rewards_T = token_rewards(np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32), COUNTED, LENGTHS)
    assert rewards_T.tolist() == [0, 0, 0, 0, 1, *[0] * 7, 3, 0, 0, 0, 4]


@pytest.mark.parametrize(("gamma", "discount"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5), (1.0, 1.0)])
def test_advantages_are_the_papers_sums(gamma: float, discount: float) -> None:
    rewards_T, values_T = numbers()
    settings = GaeEstimator(gae_gamma=gamma, gae_lambda=discount)
    advantages_T, returns_T = advantages_and_returns(rewards_T, values_T, COUNTED, LENGTHS, settings)
    expected_T = plain(rewards_T, values_T, gamma, discount)
    np.testing.assert_allclose(advantages_T, expected_T, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(returns_T, np.where(COUNTED, expected_T + values_T, 0), rtol=1e-6, atol=1e-6)


def test_with_lambda_one_a_return_is_what_was_paid() -> None:
    rewards_T, values_T = numbers(1)
    settings = GaeEstimator(gae_gamma=1.0, gae_lambda=1.0)
    _, returns_T = advantages_and_returns(rewards_T, values_T, COUNTED, LENGTHS, settings)
    assert returns_T[7] == pytest.approx(rewards_T[[7, 8, 11, 12]].sum(), abs=1e-6)


def test_with_lambda_zero_an_advantage_looks_one_token_ahead_over_what_the_environment_said() -> None:
    rewards_T, values_T = numbers(2)
    settings = GaeEstimator(gae_gamma=0.5, gae_lambda=0.0)
    advantages_T, _ = advantages_and_returns(rewards_T, values_T, COUNTED, LENGTHS, settings)
    assert advantages_T[8] == pytest.approx(rewards_T[8] + 0.5 * values_T[11] - values_T[8], abs=1e-6)


def test_a_true_critic_leaves_nothing_to_learn() -> None:
    rewards_T = token_rewards(np.full(4, 2.0, dtype=np.float32), COUNTED, LENGTHS)
    values_T = np.full(len(COUNTED), 2.0, dtype=np.float32)
    advantages_T, returns_T = advantages_and_returns(rewards_T, values_T, COUNTED, LENGTHS, GaeEstimator())
    assert not advantages_T.any()
    assert returns_T.tolist() == (2.0 * COUNTED).tolist()


def test_policy_and_values_may_have_lambdas_of_their_own() -> None:
    rewards_T, values_T = numbers(3)
    settings = GaeEstimator(gae_gamma=0.9, gae_lambda=0.5, gae_lambda_policy=0.7, gae_lambda_value=1.0)
    advantages_T, returns_T = advantages_and_returns(rewards_T, values_T, COUNTED, LENGTHS, settings)
    np.testing.assert_allclose(advantages_T, plain(rewards_T, values_T, 0.9, 0.7), rtol=1e-6, atol=1e-6)
    of_value_T = np.where(COUNTED, plain(rewards_T, values_T, 0.9, 1.0) + values_T, 0)
    np.testing.assert_allclose(returns_T, of_value_T, rtol=1e-6, atol=1e-6)


def test_lambda_grows_with_the_response() -> None:
    rewards_T, values_T = numbers(4)
    settings = GaeEstimator(gae_gamma=1.0, gae_lambda=0.5, length_adaptive_alpha=0.6)
    advantages_T, returns_T = advantages_and_returns(rewards_T, values_T, COUNTED, LENGTHS, settings)
    lambdas_S = np.array([1 - 1 / 1.8, 0.0, 1 - 1 / 2.4, 0.0])  # of 3, 0, 4 and 1 tokens
    np.testing.assert_allclose(advantages_T, plain(rewards_T, values_T, 1.0, lambdas_S), rtol=1e-6, atol=1e-6)
    of_value_T = np.where(COUNTED, plain(rewards_T, values_T, 1.0, 0.5) + values_T, 0)
    np.testing.assert_allclose(returns_T, of_value_T, rtol=1e-6, atol=1e-6)


def test_nothing_counts() -> None:
    nothing_T = np.zeros(3, dtype=np.float32)
    lengths_S, valid_T = np.array([3], dtype=np.int32), np.zeros(3, dtype=np.bool_)
    assert not token_rewards(np.ones(1, dtype=np.float32), valid_T, lengths_S).any()
    for found_T in advantages_and_returns(nothing_T, nothing_T + 1, valid_T, lengths_S, GaeEstimator()):
        assert found_T.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 2.0, 3.0], 1.0), ([2.0, 2.0, 2.0], 0.0), ([3.0, 2.0, 1.0], -3.0), ([0, 1, 2], 1.0)]
)
def test_explained_variance(values: list[float], expected: float) -> None:
    returns_C = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    found = explained_variance(np.array(values, dtype=np.float32), returns_C, lambda sums: sums)
    assert found == pytest.approx(expected, abs=1e-6)


def test_explained_variance_is_that_of_all_ranks() -> None:
    random = np.random.default_rng(5)
    values_C, returns_C = random.normal(size=(2, 10)).astype(np.float32)
    whole = explained_variance(values_C, returns_C, lambda sums: sums)
    sums: list[torch.Tensor] = []

    def first_rank(own: torch.Tensor) -> torch.Tensor:
        sums.append(own)
        return own

    explained_variance(values_C[:4], returns_C[:4], first_rank)
    assert explained_variance(values_C[4:], returns_C[4:], lambda own: own + sums[0]) == pytest.approx(whole, abs=1e-9)
    assert explained_variance(values_C, np.ones(10, dtype=np.float32), lambda own: own) == 0
