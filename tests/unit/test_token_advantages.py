"""Advantages that are made where the log-probabilities are: Reinforce++."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from loss_harness import settings

from tandem.samples.batch import Float32s
from tandem.trainer.advantages import minus_kl, whitened

ADVANTAGES_T = np.array([9.0, 1.0, 1.0, -2.0, 9.0, 0.5], dtype=np.float32)
COUNTED_T = np.array([False, True, True, True, False, True])


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def test_over_the_counted_tokens_of_the_batch_the_mean_is_zero_and_the_deviation_one() -> None:
    found = whitened(ADVANTAGES_T, COUNTED_T, alone)
    counted = ADVANTAGES_T[COUNTED_T].astype(np.float64)
    np.testing.assert_allclose(found[COUNTED_T], (counted - counted.mean()) / counted.std(), rtol=1e-6)
    assert found.dtype == np.float32


def test_advantages_that_do_not_differ_become_zero() -> None:
    assert not whitened(np.full(6, 0.3, dtype=np.float32), COUNTED_T, alone)[COUNTED_T].any()


def test_a_batch_in_which_nothing_counts_is_left_finite() -> None:
    assert np.isfinite(whitened(ADVANTAGES_T, np.zeros(6, dtype=np.bool_), alone)).all()


def test_ranks_that_hold_different_sequences_normalise_over_all_of_them() -> None:
    shares_T = [COUNTED_T & (np.arange(6) < 3), COUNTED_T & (np.arange(6) >= 3)]
    barrier = threading.Barrier(2, timeout=30.0)
    given: list[torch.Tensor] = [torch.zeros(0)] * 2

    def rank(number: int) -> Float32s:
        def add(values: torch.Tensor) -> torch.Tensor:
            given[number] = values
            barrier.wait()
            total = given[0] + given[1]
            barrier.wait()
            return total

        return whitened(np.where(shares_T[number], ADVANTAGES_T, np.float32(0)), shares_T[number], add)

    expected_T = whitened(ADVANTAGES_T, COUNTED_T, alone)
    with ThreadPoolExecutor(2) as ranks:
        for number, found_T in enumerate(ranks.map(rank, range(2))):
            np.testing.assert_allclose(found_T[shares_T[number]], expected_T[shares_T[number]], rtol=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", float(np.exp(-0.5)) - 0.5)])
def test_the_divergence_of_each_token_lowers_its_advantage(kind: str, expected: float) -> None:
    previous_T = np.array([-1.0, -1.0], dtype=np.float32)
    reference_T = np.array([-1.5, -1.0], dtype=np.float32)
    config = settings(reference_policy_kl_penalty=0.1, reference_policy_kl_type=kind)
    found = minus_kl(np.array([2.0, 2.0], dtype=np.float32), previous_T, reference_T, config)
    np.testing.assert_allclose(found, [2.0 - 0.1 * expected, 2.0], rtol=1e-6)


def test_the_divergence_in_the_reward_is_clamped_as_in_the_loss() -> None:
    zeros = np.zeros(1, dtype=np.float32)
    config = settings(reference_policy_kl_penalty=1.0, reference_policy_kl_type="k1", kl_output_clamp_value=3.0)
    assert minus_kl(zeros, zeros, zeros - 50, config).tolist() == [-3.0]
