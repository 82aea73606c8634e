"""Scores of an evaluation: accuracy, pass@k and majority votes, each with an interval.

Each score is estimated for each problem from its n samples, and then averaged over problems. The estimates are
unbiased: the mean, over all ways to choose k of the n samples, of the score of those k.

Intervals are Wilson's for a proportion (Wilson 1927). Their number of trials is the effective sample size (Franco et
al. 2019, "Comparative study of confidence intervals for proportions in complex sample surveys"): as many as give a coin
the variance of the mean over problems. With one sample a problem that is the number of problems. Problems count as
drawn at random, and the samples of one as belonging together. Unlike the mean plus or minus two standard errors, these
intervals are useful near 0 and 1, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

_Z = 1.959963984540054
"""Standard deviations within which 95 per cent of the normal distribution lie."""


class SampleVote(msgspec.Struct, frozen=True):
    """One sample's vote."""

    extracted: str | None
    """Extracted answer; None casts no vote."""
    correct: bool


class ScoreEstimate(msgspec.Struct, frozen=True):
    """A score and its 95 per cent interval."""

    mean: float
    low: float
    high: float


def ks(num_samples: int, requested_k: int) -> list[int]:
    """Return the powers of two up to the number of samples, that number, and the requested k."""
    powers = {2**i for i in range(num_samples.bit_length())}
    return sorted(k for k in powers | {num_samples, requested_k} if k <= num_samples)


def pass_at(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at(answers: Sequence[SampleVote], k: int) -> float:
    """Return the chance that the most frequent answer of k samples is correct; ties are averaged.

    Samples without an answer cast no vote. The worth of an answer is the mean correctness of the samples that give it.
    """
    votes = Counter(answer.extracted for answer in answers)
    silent = votes.pop(None, 0)
    worth = {
        extracted: sum(answer.correct for answer in answers if answer.extracted == extracted) / count
        for extracted, count in votes.items()
    }
    total = sum(
        _ways(votes, worth, silent, k, num_votes) for num_votes in range(1, min(k, max(votes.values(), default=0)) + 1)
    )
    return total / math.comb(len(answers), k)


def _ways(votes: Counter[str | None], worth: dict[str | None, float], silent: int, k: int, num_votes: int) -> float:
    """Add up the scores of all choices of k samples in which the winners have exactly `num_votes` votes.

    Answers are added one by one. `ways[num_chosen][winners]` holds the number of choices with so many samples and so
    many winners, and the total worth of their winners.
    """
    longest = k // num_votes
    ways = [[(0.0, 0.0)] * (longest + 1) for _ in range(k + 1)]
    for num in range(min(silent, k) + 1):
        ways[num][0] = (float(math.comb(silent, num)), 0.0)
    for extracted, count in votes.items():
        after = [[(0.0, 0.0)] * (longest + 1) for _ in range(k + 1)]
        for num_chosen, row in enumerate(ways):
            for winners, (num_ways, worths) in enumerate(row):
                if not num_ways:
                    continue
                for num in range(min(count, num_votes, k - num_chosen) + 1):
                    wins = num == num_votes
                    choices = math.comb(count, num)
                    before = after[num_chosen + num][winners + wins]
                    added = worths + (num_ways * worth[extracted] if wins else 0.0)
                    after[num_chosen + num][winners + wins] = (
                        before[0] + num_ways * choices,
                        before[1] + added * choices,
                    )
        ways = after
    return sum(worths / winners for winners, (_, worths) in enumerate(ways[k]) if winners)


def estimate(values: Iterable[float]) -> ScoreEstimate:
    """Return the mean of problems' scores, each from 0 to 1, with its interval; without scores, nothing is known."""
    scores = [*values]
    num = len(scores)
    if not num:
        return ScoreEstimate(math.nan, 0.0, 1.0)
    mean = math.fsum(scores) / num
    variance = math.fsum((score - mean) ** 2 for score in scores) / num
    trials = mean * (1 - mean) * num / variance if variance else float(num)
    middle = (mean + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    reach = _Z / (1 + _Z**2 / trials) * math.sqrt(max(0.0, mean * (1 - mean)) / trials + (_Z / (2 * trials)) ** 2)
    return ScoreEstimate(mean, max(0.0, middle - reach), min(1.0, middle + reach))
