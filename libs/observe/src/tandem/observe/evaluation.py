"""Results of evaluations: scores with their intervals, and tables of models

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
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from tandem.common.files import open_replacement, replace_file
from tandem.common.messages import SampleScored
from tandem.config import Config

_Z = 1.959963984540054
"""Standard deviations within which 95 per cent of the normal distribution lie."""
FILE = "results.json"
_WIDTH = 120
"""Width of the table, in columns, where the output is not a terminal."""
INTERVAL = "Wilson, 95 %, over problems, with the effective sample size"


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


class ProblemResult(msgspec.Struct, frozen=True, kw_only=True):
    """One problem and its valid samples; lists are by sample. A row of the Parquet file."""

    problem_id: str
    question: str
    prompt: str
    """Prompt as the model saw it: decoded from its tokens."""
    reference: str
    """Reference answer; empty if there is none."""
    n: int
    """Number of valid samples: without those that are dropped because the environment failed on them."""
    correct: int
    """Number of correct ones."""
    responses: list[str]
    rewards: list[float]
    is_correct: list[bool]
    answers: list[str | None]
    """Answers that the environment extracted; null where it found none."""
    lengths: list[int]
    """Numbers of generated tokens."""
    finish_reasons: list[str]
    failures: list[str]
    """Reasons for which the environment gave no score; empty where it gave one."""


class ModelScores(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    model: str
    num_problems: int
    num_samples: int
    """Number of valid samples, over all problems."""
    accuracy: ScoreEstimate
    """Fraction of correct samples."""
    mean_reward: float
    pass_at: dict[int, ScoreEstimate]
    """Estimates of pass@k, by k."""
    majority_at: dict[int, ScoreEstimate] | None
    """Estimates of maj@k, by k; null if the environment extracts no answers."""
    mean_length: float
    truncated: float
    """Fraction of samples that a limit of tokens cut off."""
    num_failures: int
    """Number of samples without a score."""


class EvaluatedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem as it was given to the model."""

    problem_id: str
    question: str
    prompt: str
    reference: str


def results_of(problems: Sequence[EvaluatedProblem], samples: Sequence[SampleScored]) -> list[ProblemResult]:
    """Return the results of problems, in their order."""
    by_group: dict[int, list[SampleScored]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.group, sample.sample)):
        by_group.setdefault(sample.group, []).append(sample)
    results = []
    for group, problem in enumerate(problems):
        counted = [sample for sample in by_group.get(group, []) if not sample.dropped]
        results.append(
            ProblemResult(
                **msgspec.structs.asdict(problem),
                n=len(counted),
                correct=sum(sample.correct for sample in counted),
                responses=[sample.response for sample in counted],
                rewards=[sample.reward for sample in counted],
                is_correct=[sample.correct for sample in counted],
                answers=[sample.extracted_answer for sample in counted],
                lengths=[sample.response_length for sample in counted],
                finish_reasons=[sample.finish_reason for sample in counted],
                failures=[sample.failure for sample in counted],
            )
        )
    return results


def scores_of(
    model: str, results: Sequence[ProblemResult], samples: Sequence[SampleScored], asked_k: int
) -> ModelScores:
    """Return the scores of a model; a problem with fewer than k valid samples is left out for that k."""
    counted = [sample for sample in samples if not sample.dropped]
    num_samples = max((result.n for result in results), default=0)
    k_values = ks(num_samples, asked_k)
    votes = [[*map(SampleVote, result.answers, result.is_correct)] for result in results]
    has_answers = any(answer is not None for result in results for answer in result.answers)
    accuracy = estimate(result.correct / result.n for result in results if result.n)
    if counted:  # equal to validation's, to the last bit
        accuracy = msgspec.structs.replace(accuracy, mean=float(np.mean([sample.correct for sample in counted])))
    return ModelScores(
        model=model,
        num_problems=len(results),
        num_samples=len(counted),
        accuracy=accuracy,
        mean_reward=float(np.mean([sample.reward for sample in counted])) if counted else 0.0,
        pass_at={k: estimate(pass_at(r.n, r.correct, k) for r in results if r.n >= k) for k in k_values},
        majority_at={k: estimate(majority_at(each, k) for each in votes if len(each) >= k) for k in k_values}
        if has_answers
        else None,
        mean_length=float(np.mean([sample.response_length for sample in samples])),
        truncated=float(np.mean([sample.finish_reason == "length" for sample in samples])),
        num_failures=sum(bool(sample.failure) for sample in samples),
    )


def write_results(path: Path, results: Sequence[ProblemResult]) -> None:
    """Write problems as a Parquet file, a row each. Raise `OSError` if that fails."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([msgspec.to_builtins(result) for result in results], schema=_schema())
    with open_replacement(path) as temporary:
        pq.write_table(table, temporary)


def _schema() -> object:
    import pyarrow as pa

    texts = [(name, pa.string()) for name in ("problem_id", "question", "prompt", "reference")]
    lists = {
        "responses": pa.string(),
        "rewards": pa.float64(),
        "is_correct": pa.bool_(),
        "answers": pa.string(),
        "lengths": pa.int64(),
        "finish_reasons": pa.string(),
        "failures": pa.string(),
    }
    counts = [(name, pa.int64()) for name in ("n", "correct")]
    return pa.schema([*texts, *counts, *((name, pa.list_(kind)) for name, kind in lists.items())])


class EvaluationResults(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``results.json``."""

    source: str
    """Configuration file."""
    dataset_name: str
    environment: str
    num_tests_per_prompt: int
    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    seed: int
    metric: str
    """Metric with its k, such as pass@4."""
    interval: str
    """Kind of the intervals."""
    models: list[ModelScores]


def write_table(folder: Path, evaluation: EvaluationResults) -> None:
    """Write the table as JSON. Raise `OSError` if that fails."""
    replace_file(folder / FILE, msgspec.json.format(msgspec.json.encode(evaluation)))


def print_table(evaluation: EvaluationResults, config: Config, console: Console) -> None:
    """Print the table, its settings and its headlines."""
    longest = max(len(row.model) for row in evaluation.models)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH + longest)
    many = evaluation.num_tests_per_prompt > 1
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("model", overflow="fold", min_width=min(longest, _WIDTH // 3))
    ks = sorted({k for row in evaluation.models for k in row.pass_at if k > 1})
    voted = sorted({k for row in evaluation.models for k in row.majority_at or {} if k > 2})
    columns = ["accuracy", "95 %", *(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in voted)]
    for name in (*columns, "reward", "tokens", "cut off", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in evaluation.models:
        votes = row.majority_at or {}
        table.add_row(
            row.model,
            _share(row.accuracy),
            f"{row.accuracy.low:.3f}-{row.accuracy.high:.3f}",
            *(_share(row.pass_at.get(k)) for k in ks),
            *(_share(votes.get(k)) for k in voted),
            f"{row.mean_reward:.3f}",
            f"{row.mean_length:.1f}",
            f"{row.truncated:.1%}",
            str(row.num_failures),
        )
    console.print(table)
    first = evaluation.models[0]
    per_problem = f" x {evaluation.num_tests_per_prompt} samples" if many else ""
    console.print(
        f"{first.num_problems} problems{per_problem}, temperature {evaluation.temperature:g}, seed {evaluation.seed}; "
        f"intervals: {evaluation.interval}",
        soft_wrap=True,
    )
    for line in _headline(evaluation, config):
        console.print(line, soft_wrap=True)


def headline(row: ModelScores, config: Config) -> ScoreEstimate | None:
    """Return the score that ``eval.metric`` selects."""
    k = config.eval.k_value
    return row.pass_at.get(k) if config.eval.metric == "pass@k" else (row.majority_at or {}).get(k)


def _headline(evaluation: EvaluationResults, config: Config) -> list[str]:
    lines = []
    if all(row.majority_at is None for row in evaluation.models):
        lines.append(f"no majority vote: env.{evaluation.environment} extracts no answer (Score.answer)")
    for row in evaluation.models:
        score = headline(row, config)
        if score is not None:
            scored = f"{score.mean:.4f} ({score.low:.4f}-{score.high:.4f})"
            lines.append(f"{evaluation.metric} = {scored}  {row.model}")
    return lines


def _share(score: ScoreEstimate | None) -> str:
    return "-" if score is None else f"{score.mean:.3f}"
