"""Compare synchronous with asynchronous runs: ``python scripts/plot_asynchronous.py synchronous=A,B asynchronous=C,D``.

Each label has run folders, one a seed, in the same order of seeds, and what comes first is what others are compared
with. All must have trained on as many samples. Writes the numbers to ``benchmarks/results/asynchronous.json``, and
draws ``docs/results/asynchronous.png``: held-out accuracy by step, the mean of the seeds and the band from the lowest
to the highest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from tandem.observe.report.side_by_side import RunSummary, summarise

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = ROOT / "benchmarks" / "results" / "asynchronous.json"
FIGURE = ROOT / "docs" / "results" / "asynchronous.png"
METRICS = (
    "avg_trajectory_age",
    "sampling_importance_ratio",
    "token_mult_prob_error",
    "engine_idle_s",
    "trainer_idle_s",
    "reward",
)
"""What is kept of a run beside its accuracy, as the mean over its steps."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's run."""

    val_accuracy: list[tuple[int, float]]
    """By step."""
    means: dict[str, float]
    """Over the steps, of METRICS that it has."""
    median_seconds: dict[str, float]
    wall_seconds: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, and how far apart they are."""

    runs: dict[str, list[Run]]
    num_samples: int
    """Trained on by each run, all steps together."""
    means: dict[str, list[float]]
    """Held-out accuracy of each seed, in the mean over the validations of trained weights."""
    differences: dict[str, list[float]]
    """Of these means from those of the first label, by seed."""


def run_of(summary: RunSummary) -> Run:
    """Return what is kept of a run."""
    return Run(
        val_accuracy=summary.curves["val_accuracy"],
        means={
            name: float(np.mean([value for _, value in summary.curves[name]]))
            for name in METRICS
            if name in summary.curves
        },
        median_seconds=summary.median_seconds,
        wall_seconds=summary.wall_seconds,
    )


def compare(summaries: dict[str, list[RunSummary]]) -> Comparison:
    """Return the runs by label, and how far apart labels are."""
    runs = {label: [run_of(summary) for summary in found] for label, found in summaries.items()}
    counts = {
        sum(int(value) for _, value in summary.curves["num_valid_samples"])
        for found in summaries.values()
        for summary in found
    }
    (num_samples,) = counts  # else nothing is compared after equal samples
    means = {label: [float(accuracies(run)[1:].mean()) for run in found] for label, found in runs.items()}
    first, *others = means
    return Comparison(
        runs=runs,
        num_samples=num_samples,
        means=means,
        differences={label: [b - a for a, b in zip(means[first], means[label], strict=False)] for label in others},
    )


def accuracies(run: Run) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return a run's held-out accuracies in the order of its steps."""
    return np.array([value for _, value in run.val_accuracy])


def plot(comparison: Comparison, path: Path) -> None:
    """Draw mean and band of each label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for label, runs in comparison.runs.items():
        steps = [step for step, _ in runs[0].val_accuracy]
        values_RV = np.stack([accuracies(run) for run in runs])
        (line,) = axes.plot(steps, values_RV.mean(axis=0), label=label, linewidth=1.4)
        axes.fill_between(steps, values_RV.min(axis=0), values_RV.max(axis=0), color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", title="accuracy on held-out problems")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments: list[str]) -> None:
    """Write numbers and figure."""
    words = [word.partition("=") for word in arguments]
    comparison = compare(
        {label: [summarise(Path(folder)) for folder in folders.split(",")] for label, _, folders in words}
    )
    NUMBERS.write_bytes(msgspec.json.format(msgspec.json.encode(comparison)) + b"\n")
    plot(comparison, FIGURE)


if __name__ == "__main__":
    main(sys.argv[1:])
