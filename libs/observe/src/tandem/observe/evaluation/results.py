"""The results of one model: each problem with its samples, and the scores of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tandem.common.files import open_replacement
from tandem.common.messages import SampleScored
from tandem.observe.evaluation.scores import SampleVote, ScoreEstimate, estimate, ks, majority_at, pass_at


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
