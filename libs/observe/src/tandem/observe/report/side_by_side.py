"""Tables of a report: runs in numbers, side by side, and the keys in which they differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from tandem.config import differing
from tandem.config.schema.declarations import ALGORITHMS
from tandem.observe.lines import sparkline
from tandem.observe.listing import OF_EVERY_RUN
from tandem.observe.report.panels import PHASES, TOTAL, peak_memory
from tandem.observe.run_folder.journal import ENDED, JournalReader, RefitRecord, RunRecord, StepRecord, read_journal
from tandem.observe.run_folder.journal_file import damage

_NONE = "-"
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
            median_seconds={name: _find_median_seconds(trained, name) for name in names},
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


def _find_median_seconds(records: Sequence[StepRecord], name: str) -> float:
    return statistics.median(record.seconds.get(name, 0.0) for record in records)


class ReportRun(NamedTuple):
    """A run in a report."""

    label: str
    folder: Path
    record: RunRecord
    summary: RunSummary
    config: dict[str, Any]
    """Configuration from its journal, of whichever release."""
    refits: list[RefitRecord]
    notes: list[tuple[float, str]]
    """Lines of the console during the run, with Unix times."""
    curves: dict[str, list[tuple[int, float]]]
    """Metrics, seconds and memory by step, under the names that panels use."""


class ReportRow(NamedTuple):
    """A row of a table: a label, and a value for each run."""

    title: str
    values: tuple[str, ...]


def load_runs(folders: Sequence[Path]) -> list[ReportRun]:
    """Read the journals of runs. Raises `RunFolderError` if one has none."""
    return [_load(label, folder) for label, folder in zip(labels(folders), folders, strict=True)]


def _load(label: str, folder: Path) -> ReportRun:
    with read_journal(folder) as journal:
        summary = RunSummary.of(journal)
        seconds = {f"seconds/{name}": points for name, points in summary.seconds.items()}
        return ReportRun(
            label=label,
            folder=folder,
            record=journal.run,
            summary=summary,
            curves=summary.curves | seconds | peak_memory(summary.curves),
            config=_plain_config(journal),
            refits=journal.refits(),
            notes=[(at, text) for at, member, text in journal.events() if member == "coordinator"],
        )


def _plain_config(journal: JournalReader) -> dict[str, Any]:
    """Return a run's configuration without the sections of other algorithms."""
    with damage(journal.folder):
        plain = msgspec.json.decode(journal.config_json, type=dict[str, Any])
    other_algorithms = ALGORITHMS.keys() - {journal.run.algorithm}
    return {section: value for section, value in plain.items() if section not in other_algorithms}


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that distinguish the folders."""
    parts = [folder.absolute().parts for folder in folders]
    longest = max(len(each) for each in parts)
    for depth in range(1, longest + 1):
        path_ends = ["/".join(each[-depth:]) for each in parts]
        if len({*path_ends}) == len({*parts}):
            return path_ends
    raise AssertionError("whole paths differ")


def compare_results(runs: Sequence[ReportRun]) -> list[ReportRow]:
    """Return the results of each run: steps, curves from first to last, time, tokens."""
    rows = [
        _row("run", (run.record.run_id for run in runs)),
        _row("algorithm", (run.record.algorithm for run in runs)),
        _row("model", (str(run.config.get("policy", {}).get("model_name", _NONE)) for run in runs)),
        _row("begun", (time.strftime("%Y-%m-%d %H:%M", time.localtime(run.record.created_at)) for run in runs)),
        _row("ended", map(_ending, runs)),
        _row("training steps", (str(run.summary.num_steps) for run in runs)),
    ]
    for name in SUMMED_UP:
        points = [run.summary.curves.get(name, []) for run in runs]
        if any(points):
            rows.append(_row(f"{name}, first → last", map(_first_to_last, points)))
    for name, of in (("val_accuracy", max), ("val_loss", min)):
        points = [run.summary.curves.get(name, []) for run in runs]
        if any(points):
            rows.append(_row(f"{name}, best", (_best(each, of) for each in points)))
    rows += [
        _row("tokens trained on", (_sum(run.summary.curves.get("num_valid_tokens", [])) for run in runs)),
        _row("wall time", (_duration(run.summary.wall_seconds) for run in runs)),
    ]
    return [row for row in rows if any(value != _NONE for value in row.values)]


def times(runs: Sequence[ReportRun]) -> list[ReportRow]:
    """Return the median time of a step by phase, and the speed of generation."""
    rows = [_row(TOTAL.label, (_seconds(run.summary, "total") for run in runs))]
    rows += [_row(label, (_seconds(run.summary, name) for run in runs)) for name, label in PHASES.items()]
    for name, label in (
        ("tokens_per_s", "tokens generated a second"),
        ("engine_idle_s", "engines idle, s"),
        ("trainer_idle_s", "trainers idle, s"),
    ):
        rows.append(_row(label, (_median(run.summary.curves.get(name, [])) for run in runs)))
    if any(run.refits for run in runs):
        rows.append(_row("refits", (str(len(run.refits)) if run.refits else _NONE for run in runs)))
        rows.append(_row("bytes of a refit, MB", map(_refit_megabytes, runs)))
    return [row for row in rows if any(value != _NONE for value in row.values)]


def memory(runs: Sequence[ReportRun]) -> list[ReportRow]:
    """Return the peak memory of a process of each kind in each phase, over all steps."""
    names = sorted({name for run in runs for name in run.summary.curves if name.startswith("memory_")})
    return [
        _row(
            name.removeprefix("memory_").removesuffix("_gb").replace("_", ", "),
            (f"{max(v for _, v in points):.3f}" if (points := run.summary.curves.get(name)) else _NONE for run in runs),
        )
        for name in names
    ]


def configuration_differences(runs: Sequence[ReportRun]) -> list[ReportRow]:
    """Return the keys in which configurations differ, with each run's value."""
    keys = dict.fromkeys(key for run in runs[1:] for key in differing(runs[0].config, run.config))
    return [_row(key, (_value_of(run.config, key) for run in runs)) for key in keys if key not in OF_EVERY_RUN]


def _value_of(config: Mapping[str, Any], key: str) -> str:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _NONE
        node = node[part]
    return node if isinstance(node, str) else msgspec.json.encode(node).decode()


def _row(title: str, values: Iterable[str]) -> ReportRow:
    return ReportRow(title, tuple(values))


def _ending(run: ReportRun) -> str:
    """Return how a run ended, according to its journal."""
    ends = [text for _, text in run.notes if ENDED.match(text)]
    return ends[-1].removeprefix("the run ") if ends else "no end is recorded"


def _first_to_last(points: Sequence[tuple[int, float]]) -> str:
    return f"{points[0][1]:.4g} → {points[-1][1]:.4g}" if points else _NONE


def _best(points: Sequence[tuple[int, float]], of: Any) -> str:
    if not points:
        return _NONE
    step, value = of(points, key=lambda point: point[1])
    return f"{value:.4g} (step {step})"


def _sum(points: Sequence[tuple[int, float]]) -> str:
    return f"{sum(value for _, value in points):,.0f}" if points else _NONE


def _median(points: Sequence[tuple[int, float]]) -> str:
    return f"{statistics.median(value for _, value in points):,.4g}" if points else _NONE


def _seconds(summary: RunSummary, phase: str) -> str:
    seconds, total = summary.median_seconds.get(phase), summary.median_seconds.get("total")
    if seconds is None:
        return _NONE
    return f"{seconds:.3f} s" + (f" ({seconds / total:.0%})" if total and phase != "total" else "")


def _refit_megabytes(run: ReportRun) -> str:
    if not run.refits:
        return _NONE
    return f"{statistics.median(sum(refit.num_bytes.values()) for refit in run.refits) / 1e6:,.1f}"


def _duration(seconds: float) -> str:
    minutes, hours = divmod(int(seconds) // 60, 60)[::-1]
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.1f} s"
