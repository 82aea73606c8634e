"""Sampling against closed forms: what is drawn, how often, and with which log-probability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tandem.rollout.engines.sampling import draw, restrict, uniforms

NUM_TOKENS = 12


def draw_many(
    logits_V: torch.Tensor, num_draws: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    seeds_B = np.arange(num_draws, dtype=np.uint64)
    return draw(
        logits_V.expand(num_draws, -1),
        uniforms(seeds_B, np.zeros(num_draws, np.int64)),
        np.full(num_draws, temperature, np.float32),
        np.full(num_draws, top_k, np.int64),
        np.full(num_draws, top_p, np.float32),
    )


def allowed_tokens(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The definition, in plain Python: probability by token that may be drawn."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits_V.tolist())}
    ranked = sorted(weights, key=lambda token: -weights[token])[: top_k or None]
    total = sum(weights[token] for token in ranked)
    kept: list[int] = []
    reached = 0.0
    for token in ranked:
        kept.append(token)
        reached += weights[token] / total
        if reached >= top_p:
            break
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.7), (5, 0.8), (1, 1.0), (0, 1e-6)])
def test_draws_follow_the_distribution_and_report_it(temperature: float, top_k: int, top_p: float) -> None:
    logits_V = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = allowed_tokens(logits_V, temperature, top_k, top_p)
    num_draws = 40_000
    tokens_B, logprobs_B = draw_many(logits_V, num_draws, temperature, top_k, top_p)

    counts = np.bincount(tokens_B, minlength=NUM_TOKENS)
    assert {token for token in range(NUM_TOKENS) if counts[token]} <= expected.keys()
    chi_square = sum((counts[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in expected.items())
    # With at most 11 degrees of freedom, 31.3 is exceeded by chance once in a thousand; the seeds are fixed.
    assert chi_square < 31.3
    for token, logprob in zip(tokens_B[:200].tolist(), logprobs_B[:200].tolist(), strict=True):
        assert logprob == pytest.approx(math.log(expected[token]), abs=2e-6)


def test_temperature_zero_is_the_largest_logit_with_certainty() -> None:
    logits_BV = torch.randn(50, NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    tokens_B, logprobs_B = draw(
        logits_BV,
        uniforms(np.arange(50, dtype=np.uint64), np.zeros(50, np.int64)),
        np.zeros(50, np.float32),
        np.full(50, 3, np.int64),
        np.full(50, 0.5, np.float32),
    )
    assert tokens_B.tolist() == logits_BV.argmax(-1).tolist()
    assert logprobs_B.tolist() == [0.0] * 50


def test_each_row_obeys_its_own_parameters() -> None:
    logits_BV = torch.randn(4, NUM_TOKENS, generator=torch.Generator().manual_seed(5))
    uniform_B = uniforms(np.arange(4, dtype=np.uint64), np.zeros(4, np.int64))
    temperature_B = np.array([0.0, 1.0, 0.7, 1.3], np.float32)
    top_k_B = np.array([0, 3, 0, 5], np.int64)
    top_p_B = np.array([1.0, 1.0, 0.6, 0.9], np.float32)
    together = draw(logits_BV, uniform_B, temperature_B, top_k_B, top_p_B)
    for row in range(4):
        one = slice(row, row + 1)
        alone = draw(logits_BV[one], uniform_B[one], temperature_B[one], top_k_B[one], top_p_B[one])
        assert alone[0][0] == together[0][row]
        assert alone[1][0] == pytest.approx(together[1][row], abs=1e-6)


def test_equal_logits_leave_exactly_top_k_tokens() -> None:
    kept_BV = restrict(torch.zeros(1, NUM_TOKENS), torch.tensor([5]), torch.tensor([1.0]))
    assert torch.isfinite(kept_BV[0]).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_weights_that_are_not_numbers_show_in_the_logprobs() -> None:
    for temperature in (0.0, 1.0):
        _, logprobs_B = draw_many(torch.full((NUM_TOKENS,), torch.nan), 2, temperature)
        assert np.isnan(logprobs_B).all()


def test_uniforms_are_even_and_unrelated_between_neighbours() -> None:
    seeds_N = np.repeat(np.arange(300, dtype=np.uint64), 300)
    indices_N = np.tile(np.arange(300, dtype=np.int64), 300)
    values = uniforms(seeds_N, indices_N)
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == len(values)
    bins = np.bincount((values * 64).astype(int), minlength=64)
    expected = len(values) / 64
    assert ((bins - expected) ** 2 / expected).sum() < 104  # 63 degrees of freedom, one in a thousand
    grid = values.reshape(300, 300) - 0.5
    for one, other in [(grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, :-1], grid[:-1, 1:])]:
        assert abs((one * other).mean() * 12) < 4 / math.sqrt(one.size)


def test_the_least_and_largest_uniform_numbers_draw_possible_tokens() -> None:
    logits_V = torch.tensor([-torch.inf, 0.0, 1.0, 2.0, -torch.inf])
    tokens_B, logprobs_B = draw(
        logits_V.expand(2, -1),
        np.array([0.0, 1 - 2.0**-48]),
        np.ones(2, np.float32),
        np.zeros(2, np.int64),
        np.ones(2, np.float32),
    )
    assert tokens_B.tolist() == [1, 3]
    assert np.isfinite(logprobs_B).all()
