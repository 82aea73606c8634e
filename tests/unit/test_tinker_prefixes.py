"""Common prefixes of a client's sequences: what their groups save, beside all groups that there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tandem.coordinator.tinker.prefixes import prefixes_of
from tandem.samples.assignment import NO_PROMPT


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to divide rows into groups."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [rows[:1], *rest]
        for place, group in enumerate(rest):
            yield [*rest[:place], [rows[0], *group], *rest[place + 1 :]]


def saved(sequences: Sequence[Sequence[int]], group: Sequence[int]) -> int:
    """Return the tokens that a group of rows needs not compute: it keeps the last token of each sequence apart."""
    texts = [sequences[row][:-1] for row in group]
    same = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False))
    return (len(group) - 1) * len([*same])


@pytest.mark.parametrize("seed", range(40))
def test_other_groups_save_hardly_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(7)]
    found = prefixes_of([np.array(each, dtype=np.int32) for each in sequences])
    total = 0
    for prompt in {*found.prompt_S.tolist()} - {NO_PROMPT}:
        group = np.flatnonzero(found.prompt_S == prompt).tolist()
        (length,) = {*found.prompt_lengths_S[group].tolist()}
        assert (len(group) - 1) * length == saved(sequences, group) > 0
        total += saved(sequences, group)
    assert found.prompt_lengths_S[found.prompt_S == NO_PROMPT].tolist() == [0] * (found.prompt_S == NO_PROMPT).sum()
    best = max(sum(saved(sequences, group) for group in groups) for groups in partitions([*range(7)]))
    assert 0.85 * best <= total <= best


def test_prompts_that_begin_alike_are_told_apart_where_that_saves_more() -> None:
    long, short = list(range(100)), list(range(10))
    prompts = [[*long, 7], [*long, 8], [*long, 7, 1], [*short, 99], [*short, 98], [5]]
    found = prefixes_of([np.array([*prompt, 3], dtype=np.int32) for prompt in prompts])
    assert found.prompt_S.tolist() == [0, 0, 0, 3, 3, NO_PROMPT]
    assert found.prompt_lengths_S.tolist() == [100, 100, 100, 10, 10, 0]


def test_many_sequences_of_which_each_begins_with_the_one_before() -> None:
    tokens = np.arange(3000, dtype=np.int32)
    found = prefixes_of([tokens[: 1 + row] for row in range(3000)])
    assert found.prompt_lengths_S.max() == 1500, "half of them, with half of the tokens"
