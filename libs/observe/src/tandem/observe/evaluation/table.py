"""The table of an evaluation: a row for each model, for people and as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.common.files import replace_file
from tandem.config import Config
from tandem.observe.evaluation.results import ModelScores
from tandem.observe.evaluation.scores import ScoreEstimate

FILE = "results.json"
_WIDTH = 120
"""Width of the table, in columns, where the output is not a terminal."""
INTERVAL = "Wilson, 95 %, over problems, with the effective sample size"


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
