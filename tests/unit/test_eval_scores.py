"""The scores of an evaluation, against every choice of samples gone through one by one."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tandem.observe.evaluation import SampleVote, estimate, ks, majority_at, pass_at


def voted(answers: Sequence[SampleVote]) -> float:
    """What a vote is worth: the mean over winners, each as correct as those who give it are in all of the samples."""
    votes = Counter(answer.extracted for answer in answers if answer.extracted is not None)
    most = max(votes.values(), default=0)
    winners = [extracted for extracted, count in votes.items() if count == most]
    return sum(extracted == "right" for extracted in winners) / len(winners) if winners else 0.0


@pytest.mark.parametrize(("num", "correct"), [(1, 0), (1, 1), (5, 2), (8, 1), (8, 8), (10, 9)])
def test_pass_at_k_is_the_share_of_choices_with_a_correct_sample(num: int, correct: int) -> None:
    samples = [i < correct for i in range(num)]
    for k in range(1, num + 1):
        choices = [any(chosen) for chosen in itertools.combinations(samples, k)]
        assert pass_at(num, correct, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_a_majority_vote_is_the_mean_over_all_choices(seed: int) -> None:
    draw = random.Random(seed)
    given = [draw.choice(["right", "right", "wrong", "other", "third", None]) for _ in range(draw.randint(1, 9))]
    answers = [SampleVote(extracted, extracted == "right") for extracted in given]
    for k in range(1, len(answers) + 1):
        choices = [voted(chosen) for chosen in itertools.combinations(answers, k)]
        assert majority_at(answers, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_a_vote_of_the_silent_elects_nobody() -> None:
    assert majority_at([SampleVote(None, False)] * 3, 2) == 0.0


def test_an_answer_that_is_not_always_correct_is_worth_its_mean() -> None:
    answers = [SampleVote("12", True), SampleVote("12", False), SampleVote("12", True), SampleVote("7", False)]
    assert majority_at(answers, 4) == pytest.approx(2 / 3)


def test_many_samples_are_no_matter() -> None:
    answers = [SampleVote(str(i % 20), i % 20 == 3) for i in range(64)]
    assert 0.04 < majority_at(answers, 64) < 1.0
    assert majority_at([SampleVote("a", True)] * 63 + [SampleVote("b", False)], 32) == pytest.approx(1.0)


def test_powers_of_two_and_what_is_asked_for_are_told() -> None:
    assert ks(1, 1) == [1]
    assert ks(8, 1) == [1, 2, 4, 8]
    assert ks(10, 5) == [1, 2, 4, 5, 8, 10]
    assert ks(4, 9) == [1, 2, 4]


def test_one_sample_a_problem_has_the_interval_of_wilson() -> None:
    found = estimate([1.0] * 8 + [0.0] * 2)
    # Brown, Cai and DasGupta 2001 have the formula; these are its values.
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.4901625, 0.9433178), abs=1e-6)
    assert estimate([0.0] * 10).low == 0.0
    assert estimate([0.0] * 10).high == pytest.approx(0.2775328, abs=1e-6)


def test_more_samples_narrow_the_interval_as_far_as_problems_are_alike() -> None:
    one = estimate([1.0, 0.0] * 20)
    alike, apart = estimate([0.45, 0.55] * 20), estimate([1.0, 0.0] * 20)
    assert alike.high - alike.low < (one.high - one.low) / 5
    assert apart == one


def test_intervals_cover_as_often_as_they_say() -> None:
    draw = random.Random(1)
    covered = 0
    for _ in range(400):
        chances = [draw.random() ** 2 for _ in range(40)]  # of mean 1/3
        found = estimate(sum(draw.random() < chance for _ in range(4)) / 4 for chance in chances)
        covered += found.low <= 1 / 3 <= found.high
    assert 0.92 <= covered / 400 <= 0.99
