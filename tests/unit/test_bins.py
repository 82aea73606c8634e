"""Bin packing against the least number of bins, found by trying everything."""

from __future__ import annotations

import functools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.schema import PackingAlgorithm
from tandem.trainer.batching.packing import pack

ALGORITHMS: tuple[PackingAlgorithm, ...] = get_args(PackingAlgorithm)
CAPACITY = 60


def least_bins(lengths: list[int], capacity: int) -> int:
    """Return the number of bins of the best packing, by dynamic programming over subsets."""
    num = len(lengths)
    totals = [sum(lengths[i] for i in range(num) if subset >> i & 1) for subset in range(2**num)]

    @functools.cache
    def best(left: int) -> int:
        if not left:
            return 0
        first = left & -left  # in some bin; try all that it could share one with
        others, found, subset = left ^ first, num, left ^ first
        while True:
            if totals[subset | first] <= capacity:
                found = min(found, 1 + best(others ^ subset))
            if not subset:
                return found
            subset = (subset - 1) & others

    return best(2**num - 1)


BOUNDS = {
    "concatenative": lambda least: max(1, 2 * least - 1),
    "first_fit_shuffle": lambda least: int(1.7 * least),
    "first_fit_decreasing": lambda least: (11 * least + 6) // 9,
    "modified_first_fit_decreasing": lambda least: (71 * least + 60) // 60,
}
"""Proven for any lengths; for the last with Yue and Zhang's (1995) better constant."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=9))
def test_bins_hold_everything_once_and_are_few(algorithm: PackingAlgorithm, lengths: list[int]) -> None:
    bins = pack(lengths, CAPACITY, algorithm)
    assert sorted(index for group in bins for index in group) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in group) <= CAPACITY for group in bins)
    least = least_bins(lengths, CAPACITY)
    assert least <= len(bins) <= BOUNDS[algorithm](least)
    assert bins == pack(lengths, CAPACITY, algorithm), "every rank finds the same"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_sequences_need_no_bin(algorithm: PackingAlgorithm) -> None:
    assert pack([], CAPACITY, algorithm) == []


def test_concatenative_keeps_the_order() -> None:
    assert pack([30, 20, 20, 60, 1], 60, "concatenative") == [[0, 1], [2], [3], [4]]


def test_first_fit_decreasing_goes_back_to_bins_with_room() -> None:
    assert pack([20, 50, 30, 10, 25], 60, "first_fit_decreasing") == [[1, 3], [2, 4], [0]]


def test_first_fit_shuffle_goes_by_no_order_of_its_input() -> None:
    lengths = [10] * 24
    order = [index for group in pack(lengths, 60, "first_fit_shuffle") for index in group]
    assert sorted(order) == list(range(24)) != order


def test_modified_first_fit_decreasing_needs_the_fewest_where_first_fit_decreasing_does_not() -> None:
    # The smallest items fit best with the largest: first fit, in descending order, spends the others on them.
    lengths = [51, 51, 27, 27, 26, 26, 23, 23, 23, 23]
    assert len(pack(lengths, 100, "modified_first_fit_decreasing")) == least_bins(lengths, 100) == 3
    assert len(pack(lengths, 100, "first_fit_decreasing")) == 4


def test_many_sequences_fill_their_bins() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.6, 2000).astype(int).clip(1, 2048).tolist()
    least = -(-sum(lengths) // 4096)
    numbers = {algorithm: len(pack(lengths, 4096, algorithm)) for algorithm in ALGORITHMS}
    assert numbers["modified_first_fit_decreasing"] <= least + 1
    assert numbers["first_fit_decreasing"] <= least + 1
    assert numbers["first_fit_shuffle"] <= 1.02 * least + 1
    assert numbers["concatenative"] <= 1.1 * least + 1
