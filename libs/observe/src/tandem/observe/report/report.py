"""Reports on runs, side by side: as one HTML file, as PNG, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import RunFolderError
from tandem.observe.held_out_accuracy import no_progress
from tandem.observe.report.figure import draw_curves, draw_panels
from tandem.observe.report.frozen import frozen_page
from tandem.observe.report.side_by_side import (
    ReportRow,
    ReportRun,
    compare_results,
    configuration_differences,
    load_runs,
)
from tandem.observe.report.summary import format_breakdown, format_curves


def write_report(folders: Sequence[Path], out: Path, *, is_brief: bool = False) -> list[ReportRun]:
    """Write the report of one or more runs to a folder; ``report.json`` describes the first of them.

    If it is brief, ``report.png`` has two panels, which take a fraction of the time of eight. Raises `RunFolderError`
    if there is no run, or the folder cannot be written.
    """
    runs = load_runs(folders)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(runs[0].summary)))
        (out / "report.html").write_text(frozen_page(runs), encoding="utf-8")
        if is_brief:
            draw_curves({run.label: run.summary for run in runs}, out / "report.png")
        else:
            draw_panels(runs, out / "report.png")
    except OSError as error:
        raise RunFolderError(f"cannot write the report to {out}: {error.strerror or error}") from error
    return runs


def format_report(runs: Sequence[ReportRun], out: Path) -> str:
    """Describe finished runs: curves, results, time spent, and the place of the report."""
    lines: list[str] = []
    for run in runs:
        if len(runs) > 1:
            lines.append(f"{run.label}:")
        lines += format_curves(run.summary)
        if (course := no_progress(run.summary.curves.get("val_accuracy", ()))) is not None:
            lines.append(f"warning: {course}")
        if run.summary.num_steps:
            lines.append(format_breakdown(run.summary))
        lines.append(f"{run.summary.num_steps} steps in {run.summary.wall_seconds:.0f} s")
        if len(runs) > 1:
            lines.append("")
    if len(runs) > 1:
        lines += [*_table(runs, compare_results(runs)), ""]
        if differences := configuration_differences(runs):
            lines += ["configurations differ in:", *_table(runs, differences), ""]
        lines.append(f"report.html, report.png and report.json in {out}")
    else:
        lines[-1] += f"; report.html, report.png and report.json in {out}"
    return "\n".join(lines)


_WIDEST = 40
"""Most characters of a value in a table on the terminal; the page shows all of it."""


def _table(runs: Sequence[ReportRun], rows: Sequence[ReportRow]) -> list[str]:
    """Lay rows out in columns, one per run."""
    cells = [("", *(run.label for run in runs)), *((row.title, *row.values) for row in rows)]
    short = [[cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…" for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in short]
