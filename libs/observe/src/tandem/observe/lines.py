"""Lines for people: finished steps, durations, the time left, curves of characters, a table of refits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.common.errors import RunFolderError
from tandem.observe.run_folder.journal import RefitRecord, StepRecord, read_journal

_BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60
NUM_RECENT = 20
"""Number of recent steps from which the remaining time is estimated."""


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Draw values as a line of bars, from their smallest to their largest; neighbours are averaged to fit `width`.

    NaN and infinite values are left out.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def step_line(record: StepRecord, last_step: int, times: str = "") -> str:
    """Describe a finished step in one line; `times` describes the progress."""
    metrics, seconds = record.metrics, record.seconds
    parts = [f"step {record.step}/{last_step}"]
    for name, label in (*curves_of(metrics), ("avg_trajectory_age", "mean age")):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:.3f}")
    if "val_loss" in metrics:
        parts.append(f"held-out loss {metrics['val_loss']:.3f}")
    if "tokens_per_s" in metrics:
        parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    if times:
        parts.append(times)
    parts.append(f"{seconds.get('total', 0.0):.2f} s ({shares(seconds)})")
    return "  ".join(parts)


def seconds_left(
    records: Sequence[StepRecord], last_step: int, since_s: float = 0.0, again: Sequence[StepRecord] = ()
) -> float | None:
    """Return the remaining time, estimated from the mean of the latest steps; None if no step is done.

    A mean includes validations and checkpoints, which a median would ignore. The first step, in which everything warms
    up, counts only while it is the only one. `since_s` is the time since the last step was done. If all steps are being
    repeated, the estimate uses `again`, their earlier records.
    """
    first_s = total_s = 0.0
    num_steps = 0  # after the first
    for record in (records or again)[-NUM_RECENT:]:
        if record.step > 1:
            num_steps += 1
            total_s += record.seconds.get("total", 0.0)
        elif record.step == 1:
            first_s = record.seconds.get("total", 0.0)
    mean_s = total_s / num_steps if num_steps else first_s
    if not mean_s:
        return None
    last_done = records[-1].step if records else 0
    return max(0.0, (last_step - last_done) * mean_s - since_s)


def clock(seconds: float) -> str:
    """Write a duration as hours, minutes and seconds: ``1:02:03``."""
    minutes, rest_s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest_s:02}"


def curves_of(metrics: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    """Return the metrics to show, with their labels.

    GRPO's accuracy is left out, since its reward says the same. Without a reference, the divergence shown is that
    within the step, if any.
    """
    rewarded = ("reward", "reward") if "reward" in metrics else ("accuracy", "accuracy")
    divergence = ("kl", "kl") if metrics.get("kl") else ("approx_kl", "kl of the step")
    curves = (rewarded, ("val_accuracy", "held-out accuracy"), ("loss", "loss"))
    return (*curves, *((divergence,) if metrics.get(divergence[0]) else ()), ("entropy", "entropy"))


def shares(seconds: Mapping[str, float]) -> str:
    """Describe how a step's time was spent, the largest share first."""
    total = seconds.get("total", 0.0)
    parts: list[str] = []
    for phase_s, name in sorted(zip(seconds.values(), seconds, strict=True), reverse=True):
        if name != "total" and total and phase_s / total > 0.005:
            parts.append(f"{name} {phase_s / total:.0%}")
    return " ".join(parts) or "no time at all"


_COLUMNS = {
    "version": "version of the weights: number of training steps",
    "engines": "number of engines that received it",
    "MB": "megabytes moved; in place: engines read the trainers' memory, and nothing is moved",
    "copy ms": "time of the slowest process to move bytes",
    "predicted": "time predicted from the rates of cluster.links, in ms",
    "of bound": "least possible time over actual time of copying: 1.00 is the best",
    "transfer": "time until every engine held the version, in ms",
    "verify": "time from then until the version was verified, beside generation, in ms",
    "digest": "digest of the whole version, independent of sharding",
}
"""Columns and their meanings."""
_WIDTH = 100
"""Width of the table in characters; a narrower terminal wraps it, and loses nothing."""


def print_refits(folder: Path, console: Console) -> None:
    """Print the refits of the run in `folder`. Raises `RunFolderError` if it holds no run, or one without refits."""
    with read_journal(folder) as journal:
        records = journal.refits()
    if not records:
        raise RunFolderError(f"{folder} holds a run without refits")
    console.width = max(console.width, _WIDTH)
    console.print(refit_table(records))
    for column, meaning in _COLUMNS.items():
        console.print(f"  {column:<10} {meaning}", style="dim", highlight=False)
    for line in _links(records):
        console.print(line)
    for record in records:
        for engine, reason in record.quarantined.items():
            console.print(f"version {record.version}: {engine} was quarantined and refitted: {reason}", style="red")


def refit_table(records: Sequence[RefitRecord]) -> Table:
    """Return a table with one row per refit."""
    table = Table(box=None, header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            str(record.version),
            str(len(record.engines)),
            "in place" if record.is_aliased else f"{sum(record.num_bytes.values()) / 1e6:.1f}",
            _milliseconds(record.seconds.get("copy")),
            _milliseconds(record.predicted_s),
            f"{record.share_of_bound:.2f}" if record.bound_s else "",
            _milliseconds(record.seconds.get("transfer")),
            _milliseconds(record.seconds.get("verify")),
            f"{record.digest:016x}" if record.digest else "not verified",
        )
    return table


def _links(records: Sequence[RefitRecord]) -> list[str]:
    """Return a line per link, with its total bytes."""
    totals: dict[str, int] = {}
    for record in records:
        for link, num_bytes in record.num_bytes.items():
            totals[link] = totals.get(link, 0) + num_bytes
    return [
        f"{link}  {f'{num_bytes / 1e6:,.1f} MB in all' if num_bytes else 'read in place'}"
        for link, num_bytes in sorted(totals.items())
    ]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"
