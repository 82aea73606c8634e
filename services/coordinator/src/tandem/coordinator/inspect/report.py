"""Report on a run: its curves as PNG and JSON, and where the time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.common import gc_tuning
from tandem.common.algorithms import ALGORITHMS
from tandem.coordinator.run.journal import StepRecord, read_journal
from tandem.coordinator.run.progress import sparkline

_BREAKDOWN = {
    "total": "total step time",
    "policy_training": "policy training",
    "refit": "refit",
    "generation": "generation",
    "get_logprobs": "get log-probabilities",
}
"""The rows of NeMo-RL's published step-time table."""
_SUMMED_UP = ("reward", "val_accuracy", "loss", "val_loss", "val_rewards_chosen_mean", "val_rewards_rejected_mean")
"""Metrics whose way from first to last is told, of those that a run has."""
_PHASES = ("generation", "training", "refit")
_PROCESSES = ("trainer", "engine")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers: what ``report.json`` holds."""

    run_id: str
    algorithm: str
    num_steps: int
    curves: dict[str, list[tuple[int, float]]]
    """Metric by name, as pairs of step and value."""
    median_seconds: dict[str, float]
    """Of a training step, by phase."""
    wall_seconds: float
    """All steps together."""


def summarise(folder: Path) -> RunSummary:
    """Read a run's journal. Raises `RunFolderError` if there is none."""
    with read_journal(folder) as journal:
        steps = journal.steps()
        run = journal.run
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in steps:
        for name, value in record.metrics.items():
            curves.setdefault(name, []).append((record.step, value))
    trained = [record for record in steps if record.step > 0]
    names = sorted({name for record in trained for name in record.seconds})
    return RunSummary(
        run_id=run.run_id,
        algorithm=run.algorithm,
        num_steps=len(trained),
        curves=curves,
        median_seconds={name: _median(trained, name) for name in names},
        wall_seconds=sum(record.seconds.get("total", 0.0) for record in steps),
    )


def write_report(folder: Path, out: Path, beside: Sequence[Path] = ()) -> RunSummary:
    """Write ``report.json`` and ``report.png`` of the run in `folder` to `out`; draw the curves of others beside."""
    summary = summarise(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    plot({folder.name: summary} | {other.name: summarise(other) for other in beside}, out / "report.png")
    return summary


@gc_tuning.paused()  # the import
def plot(runs: dict[str, RunSummary], path: Path) -> None:
    """Draw what one or more runs trained on and what they held out, by step: its algorithm declares which metrics."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for label, summary in runs.items():
        for axes, name in zip((left, right), ALGORITHMS[summary.algorithm].curves, strict=True):
            points = summary.curves.get(name, [])
            axes.plot([s for s, _ in points], [v for _, v in points], label=label, linewidth=1.2)
            axes.set(xlabel="step", title=_TITLES[name])
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


_TITLES = {
    "reward": "mean reward of the training samples",
    "val_accuracy": "accuracy on held-out problems",
    "loss": "training loss",
    "val_loss": "loss on held-out problems",
}


def format_summary(folder: Path) -> str:
    """Describe a run that ended: its curve, what it reached, where the time went, where things lie."""
    summary = summarise(folder)
    lines: list[str] = []
    told = {name: summary.curves[name] for name in _SUMMED_UP if len(summary.curves.get(name, [])) > 1}
    width = max([14, *(len(name) for name in told)])
    for name, points in told.items():
        values = [value for _, value in points]
        lines.append(f"{name:>{width}}  {values[0]:.3f} → {values[-1]:.3f}  {sparkline(values)}")
    lines.append(format_breakdown(summary))
    lines.append(f"{summary.num_steps} steps in {summary.wall_seconds:.0f} s; report.png and report.json in {folder}")
    return "\n".join(lines)


def format_breakdown(summary: RunSummary) -> str:
    """Return the step-time table: medians over the training steps."""
    total = summary.median_seconds.get("total", 0.0)
    rows = ["median step       seconds  share"]
    for name, label in _BREAKDOWN.items():
        if name in summary.median_seconds:
            seconds = summary.median_seconds[name]
            rows.append(f"  {label:<22} {seconds:7.3f}  {seconds / total if total else 0.0:5.1%}")
    rows += _memory_table(summary)
    lengths = summary.curves.get("mean_generation_length", [])
    if lengths:
        rows.append(f"  {'tokens per sample':<22} {statistics.fmean(v for _, v in lengths):7.1f}")
    return "\n".join(rows)


def _memory_table(summary: RunSummary) -> list[str]:
    """Return the most memory that a process of each kind had in each phase, in all steps."""
    found = {
        (kind, phase): max(value for _, value in points)
        for kind in _PROCESSES
        for phase in _PHASES
        if (points := summary.curves.get(f"memory_{phase}_{kind}_gb"))
    }
    if not found:
        return []
    table = [f"peak memory, GB {''.join(f'{phase:>12}' for phase in _PHASES)}"]
    for kind in dict.fromkeys(kind for kind, _ in found):
        cells = [f"{found[kind, phase]:12.3f}" if (kind, phase) in found else f"{'-':>12}" for phase in _PHASES]
        table.append(f"  {kind:<14}{''.join(cells)}")
    return table


def _median(records: Sequence[StepRecord], name: str) -> float:
    return statistics.median(record.seconds.get(name, 0.0) for record in records)
