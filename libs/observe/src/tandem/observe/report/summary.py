"""A run in numbers: its curves, and where its time and memory went."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from tandem.observe.lines import sparkline
from tandem.observe.run_folder.journal import JournalReader, StepRecord, read_journal

_BREAKDOWN = {
    "total": "total step time",
    "policy_training": "policy training",
    "refit": "refit",
    "generation": "generation",
    "get_logprobs": "get log-probabilities",
}
"""The rows of NeMo-RL's published step-time table."""
SUMMED_UP = ("reward", "val_accuracy", "loss", "val_loss", "val_rewards_chosen_mean", "val_rewards_rejected_mean")
"""Metrics summarised from first to last value, if a run has them."""
_PHASES = ("generation", "training", "refit")
_PROCESSES = ("trainer", "engine")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers: the content of ``report.json``."""

    run_id: str
    algorithm: str
    num_steps: int
    curves: dict[str, list[tuple[int, float]]]
    """Pairs of step and value, by metric."""
    median_seconds: dict[str, float]
    """Median seconds of a training step, by phase."""
    wall_seconds: float
    """Seconds of all steps together."""
    seconds: dict[str, list[tuple[int, float]]] = msgspec.field(default_factory=dict)
    """Pairs of step and seconds, by phase."""

    @classmethod
    def of(cls, journal: JournalReader) -> Self:
        """Read a journal's steps."""
        steps, run = journal.steps(), journal.run
        trained = [record for record in steps if record.step > 0]
        names = sorted({name for record in trained for name in record.seconds})
        return cls(
            run_id=run.run_id,
            algorithm=run.algorithm,
            num_steps=len(trained),
            curves=_curves((record.step, record.metrics) for record in steps),
            median_seconds={name: _median(trained, name) for name in names},
            wall_seconds=sum(record.seconds.get("total", 0.0) for record in steps),
            seconds=_curves((record.step, record.seconds) for record in trained),
        )


def summarise(folder: Path) -> RunSummary:
    """Read a run's journal. Raises `RunFolderError` if there is none."""
    with read_journal(folder) as journal:
        return RunSummary.of(journal)


def _curves(steps: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, values in steps:
        for name, value in values.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def format_curves(summary: RunSummary) -> list[str]:
    """Describe a run's main metrics from first to last value, one line each."""
    curves = {name: summary.curves[name] for name in SUMMED_UP if len(summary.curves.get(name, [])) > 1}
    width = max([14, *(len(name) for name in curves)])
    lines = []
    for name, points in curves.items():
        values = [value for _, value in points]
        lines.append(f"{name:>{width}}  {values[0]:.3f} → {values[-1]:.3f}  {sparkline(values)}")
    return lines


def format_breakdown(summary: RunSummary) -> str:
    """Return the step-time table: medians over the training steps."""
    total = summary.median_seconds.get("total", 0.0)
    rows = ["median step       seconds  share"]
    for name, label in _BREAKDOWN.items():
        if seconds := summary.median_seconds.get(name):
            rows.append(f"  {label:<22} {seconds:7.3f}  {seconds / total if total else 0.0:5.1%}")
    rows += _memory_table(summary)
    lengths = summary.curves.get("mean_generation_length", [])
    if lengths:
        rows.append(f"  {'tokens per sample':<22} {statistics.fmean(v for _, v in lengths):7.1f}")
    return "\n".join(rows)


def _memory_table(summary: RunSummary) -> list[str]:
    """Return a table of the peak memory of a process of each kind in each phase, over all steps."""
    peaks = {
        (kind, phase): max(value for _, value in points)
        for kind in _PROCESSES
        for phase in _PHASES
        if (points := summary.curves.get(f"memory_{phase}_{kind}_gb"))
    }
    if not peaks:
        return []
    table = [f"peak memory, GB {''.join(f'{phase:>12}' for phase in _PHASES)}"]
    for kind in dict.fromkeys(kind for kind, _ in peaks):
        cells = [f"{peaks[kind, phase]:12.3f}" if (kind, phase) in peaks else f"{'-':>12}" for phase in _PHASES]
        table.append(f"  {kind:<14}{''.join(cells)}")
    return table


def _median(records: Sequence[StepRecord], name: str) -> float:
    return statistics.median(record.seconds.get(name, 0.0) for record in records)
