"""Reports on runs, side by side: as one HTML file, as PNG, and as JSON.

The PNG has the eight panels of a report; another has the two that the README shows. Matplotlib is imported when a
figure is drawn.

The HTML file is the page of runs: its own front end, which finds the runs' data within the file. It loads nothing and
links to nothing, and so opens without a server or a network. All that users and models wrote is data, which the front
end shows as text. The file's policy lets a browser run only the scripts that are in it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import posixpath
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from tandem.common import gc_tuning
from tandem.common.errors import RunFolderError, SamplesError
from tandem.config.schema.declarations import ALGORITHMS
from tandem.observe import page
from tandem.observe.health import no_progress
from tandem.observe.page.reader import RunReader
from tandem.observe.page.samples import PURPOSES, read_sample
from tandem.observe.page.series import Along, CurveSeries, RunCurves
from tandem.observe.page.thumbnails import FOLDER, embed_thumbnails
from tandem.observe.report import side_by_side
from tandem.observe.report.panels import PHASES, SECONDS, PanelCurve, ReportPanel, panels_of
from tandem.observe.timeline import flame, timeline

_TITLES = {
    "reward": "mean reward of the training samples",
    "val_accuracy": "accuracy on held-out problems",
    "loss": "training loss",
    "val_loss": "loss on held-out problems",
}
_STYLES = ("-", "--", ":")
ROUNDING = 1e-4
"""Relative difference of values below which an axis does not separate them."""
_FEW = 40
"""Number of points below which each is marked; a curve of one point would be invisible otherwise."""


@gc_tuning.pause_collection()  # the import
def draw_panels(runs: Sequence[side_by_side.ReportRun], path: Path) -> None:
    """Draw the eight panels of one or more runs."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(2, 4, figsize=(18, 7.5))
    for panel, place in zip(panels_of(run.summary.algorithm for run in runs), axes.flat, strict=True):
        place.set_title(panel.title, fontsize="medium")
        place.grid(alpha=0.3)
        place.tick_params(labelsize="small")
        if panel.title == SECONDS and len(runs) == 1:
            _stack(place, runs[0])
        else:
            _draw(place, panel, runs)
    for place in axes.flat:
        place.set_xlabel("step", fontsize="small")
        place.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw(axes: Any, panel: ReportPanel, runs: Sequence[side_by_side.ReportRun]) -> None:
    """Draw the curves of a panel; several runs differ in colour, as do the curves of a single run."""
    left_curves, right_curves = panel.select_drawn([run.curves for run in runs])
    if not left_curves and not right_curves:
        axes.text(0.5, 0.5, panel.missing, ha="center", va="center", transform=axes.transAxes, color="grey")
        axes.tick_params(labelbottom=False, bottom=False)
        axes.set_yticks([])
        return
    sides = [(axes, left_curves)] if left_curves else []
    if right_curves:
        sides.append((axes.twinx() if left_curves else axes, right_curves))
    lines: list[Any] = []
    number = 0
    for side, curves in sides:
        for curve in curves:
            lines += _lines(side, curve, number, runs)
            number += 1
        side.tick_params(labelsize="small")
        _widen(side)
        if len(sides) > 1:
            side.set_ylabel(", ".join(curve.label for curve in curves), fontsize="small")
    axes.legend(handles=lines, fontsize="x-small").set_zorder(9)


def _widen(side: Any) -> None:
    """Hide differences due to rounding, which would give an axis an unreadable offset."""
    low, high = side.get_ylim()
    least = ROUNDING * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        side.set_ylim(middle - least, middle + least)
    side.ticklabel_format(axis="y", useOffset=False)


def _lines(side: Any, curve: PanelCurve, number: int, runs: Sequence[side_by_side.ReportRun]) -> list[Any]:
    lines = []
    for place, run in enumerate(runs):
        points = run.curves.get(curve.name, [])
        if points:
            label = curve.label if len(runs) == 1 else f"{run.label}: {curve.label}"
            (line,) = side.plot(
                [step for step, _ in points],
                [value for _, value in points],
                _STYLES[number % len(_STYLES)],
                color=f"C{place if len(runs) > 1 else number}",
                label=label,
                linewidth=1.2,
                marker="." if len(points) < _FEW else None,
            )
            lines.append(line)
    return lines


def _stack(axes: Any, run: side_by_side.ReportRun) -> None:
    """Stack the seconds of a run's phases."""
    layers = _stack_seconds(run.summary)
    if layers:
        steps = [step for step, _ in run.summary.seconds["total"]]
        axes.stackplot(steps, *layers.values(), labels=[*layers], alpha=0.8)
        axes.legend(fontsize="x-small")


def _stack_seconds(summary: side_by_side.RunSummary) -> dict[str, list[float]]:
    """Return the seconds of each phase at every step, and the rest, by label."""
    totals = summary.seconds.get("total", [])
    layers: dict[str, list[float]] = {}
    for name, label in PHASES.items():
        of_step = dict(summary.seconds.get(name, []))
        if any(of_step.values()):
            layers[label] = [of_step.get(step, 0.0) for step, _ in totals]
    if layers:
        parts = [sum(values) for values in zip(*layers.values(), strict=True)]
        layers["other"] = [max(0.0, total - part) for (_, total), part in zip(totals, parts, strict=True)]
    return layers


@gc_tuning.pause_collection()  # the import
def draw_curves(runs: Mapping[str, side_by_side.RunSummary], path: Path) -> None:
    """Draw the training and held-out curves of runs by step: two panels, declared by their algorithms."""
    pyplot = _pyplot()
    # Margins that fit tick labels: computing them would draw everything twice.
    margins = {"left": 0.08, "right": 0.98, "bottom": 0.13, "top": 0.91, "wspace": 0.2}
    figure, (train_axes, val_axes) = pyplot.subplots(1, 2, figsize=(10, 4), gridspec_kw=margins)
    for label, summary in runs.items():
        for axes, name in zip((train_axes, val_axes), ALGORITHMS[summary.algorithm].curves, strict=True):
            points = summary.curves.get(name, [])
            axes.plot([s for s, _ in points], [v for _, v in points], label=label, linewidth=1.2)
            axes.set(xlabel="step", title=_TITLES[name])
    for axes in (train_axes, val_axes):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_report(folders: Sequence[Path], out: Path, *, is_brief: bool = False) -> list[side_by_side.ReportRun]:
    """Write the report of one or more runs to a folder; ``report.json`` describes the first of them.

    If it is brief, ``report.png`` has two panels, which take a fraction of the time of eight. Raises `RunFolderError`
    if there is no run, or the folder cannot be written.
    """
    runs = side_by_side.load_runs(folders)
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


def format_report(runs: Sequence[side_by_side.ReportRun], out: Path) -> str:
    """Describe finished runs: curves, results, time spent, and the place of the report."""
    lines: list[str] = []
    for run in runs:
        if len(runs) > 1:
            lines.append(f"{run.label}:")
        lines += side_by_side.format_curves(run.summary)
        if (course := no_progress(run.summary.curves.get("val_accuracy", ()))) is not None:
            lines.append(f"warning: {course}")
        if run.summary.num_steps:
            lines.append(side_by_side.format_breakdown(run.summary))
        lines.append(f"{run.summary.num_steps} steps in {run.summary.wall_seconds:.0f} s")
        if len(runs) > 1:
            lines.append("")
    if len(runs) > 1:
        lines += [*_table(runs, side_by_side.compare_results(runs)), ""]
        if differences := side_by_side.configuration_differences(runs):
            lines += ["configurations differ in:", *_table(runs, differences), ""]
        lines.append(f"report.html, report.png and report.json in {out}")
    else:
        lines[-1] += f"; report.html, report.png and report.json in {out}"
    return "\n".join(lines)


_WIDEST = 40
"""Most characters of a value in a table on the terminal; the page shows all of it."""


def _table(runs: Sequence[side_by_side.ReportRun], rows: Sequence[side_by_side.ReportRow]) -> list[str]:
    """Lay rows out in columns, one per run."""
    cells = [("", *(run.label for run in runs)), *((row.title, *row.values) for row in rows)]
    short = [[cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…" for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in short]


_STATIC = Path(page.__file__).parent / "static"
_NUM_SAMPLES_SHOWN = 12
"""Most samples of a vision model: of the newest step, and of the newest validation."""
_NUM_POINTS = 400
"""Most points of a curve, each the mean, minimum and maximum of a bucket of steps."""
_NUM_REFITS = 200
_NUM_EVENTS = 500
_NUM_STEPS = 10
"""Number of the newest steps whose timeline is in the file."""
_ALONG: tuple[Along, ...] = ("tokens", "time")
_REPLACED = {"api.js": "frozen/api.js", "csv.js": "frozen/csv.js"}
"""Modules of the page in whose place the file has others."""

_IMPORT = re.compile(r'(\bfrom |\bimport\()"(\.[^"]+\.js)"')
_TAG = re.compile(
    r"<meta http-equiv=.*?>"
    r'|<link rel="(?P<rel>\w+)" href="(?P<href>[^"]+)"[^>]*>\n?'
    r'|<script src="(?P<src>[^"]+)"(?P<how>[^>]*)></script>',
    re.DOTALL,
)


def frozen_page(runs: Sequence[side_by_side.ReportRun]) -> str:
    """Return the page of these runs."""
    data = [_data(index, run) for index, run in enumerate(runs)]
    data[0]["tables"] = [
        {"title": title, "note": note, "rows": [[row.title, row.values] for row in rows]}
        for title, note, rows in _tables(runs)
    ]
    # A script element ends at the first "</script>", whatever it is part of.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    title = f"<title>{escape(', '.join(run.label for run in runs))}</title>"
    html = _self_contained(_read("index.html"))
    html = re.sub(r"<title>.*?</title>", lambda _: title, html)
    return html.replace("</body>", f'<script type="application/json" id="frozen">{text}</script>\n</body>')


# --- the front end -----------------------------------------------------------------------------------------------


def _self_contained(html: str) -> str:
    """Return the page with all that it names within it, and a policy that permits that and nothing else."""
    scripts: list[str] = []
    styles: list[str] = []
    modules = [
        path.relative_to(_STATIC).as_posix() for folder in (".", "frozen") for path in _STATIC.glob(f"{folder}/*.js")
    ]
    sources = {
        f"tandem/{name}": _url(_module(_REPLACED.get(name, name)), "text/javascript") for name in sorted(modules)
    }

    def hashed(text: str, into: list[str]) -> str:
        into.append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return text

    def replacement(tag: re.Match[str]) -> str:
        if tag["src"] is not None:
            if "module" in tag["how"]:
                first = f'import "tandem/{tag["src"]}";'
                return f'<script type="module">{hashed(first, scripts)}</script>'
            return f"<script>{hashed(_read(tag['src']), scripts)}</script>"
        match tag["rel"]:
            case "stylesheet":
                return f"<style>{hashed((_STATIC / tag['href']).read_text(encoding='utf-8'), styles)}</style>\n"
            case "icon":
                return f'<link rel="icon" href="{_url(_read(tag["href"]), "image/svg+xml")}">\n'
            case _:
                return ""

    names = msgspec.json.encode({"imports": sources}).decode()
    imports = f'<script type="importmap">{hashed(names, scripts)}</script>'
    html = _TAG.sub(replacement, html)
    policy = (
        f"default-src 'none'; script-src data: {' '.join(scripts)}; style-src {' '.join(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}\n{imports}', 1)


def _module(name: str) -> str:
    """Return a module that imports others by the names of the import map: a data URL has no folder."""
    folder = posixpath.dirname(name)

    def named(match: re.Match[str]) -> str:
        return f'{match[1]}"tandem/{posixpath.normpath(posixpath.join(folder, match[2]))}"'

    return _IMPORT.sub(named, _read(name))


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _url(text: str, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


# --- the data ----------------------------------------------------------------------------------------------------


def _data(index: int, run: side_by_side.ReportRun) -> dict[str, Any]:
    """Return what ``frozen/api.js`` answers of a run."""
    reader = RunReader(run.folder)
    curves = RunCurves(reader)
    metrics = curves.names()
    view = timeline(run.folder, _NUM_STEPS, None)
    samples: dict[str, Any] = {}
    if (run.folder / FOLDER).is_dir():  # of a vision model
        samples = samples_with_thumbnails(reader)
    return {
        "summary": msgspec.structs.replace(reader.summary(index), name=run.label, path=run.label),
        "metrics": metrics,
        **_curves(curves, [metric.name for metric in metrics]),
        "config": reader.configuration(),
        "refits": reader.refits(_NUM_REFITS),
        "events": reader.events(0, _NUM_EVENTS),
        "timeline": view,
        "flames": {step.step: flame(run.folder, step.step, reader.step_seconds) for step in view.steps},
        **samples,
    }


def _curves(curves: RunCurves, names: Sequence[str]) -> dict[str, Any]:
    """Return all curves, and once for each of their sets of steps, the places of these on the horizontal axes."""
    series = curves.series(names, _NUM_POINTS, None, None)
    along = {name: curves.series(names, _NUM_POINTS, None, None, name) for name in _ALONG}
    places: dict[tuple[int, ...], int] = {}
    axes: list[dict[str, Any]] = []
    compact: dict[str, Any] = {}
    for name, of in series.items():
        at = places.setdefault(tuple(of.step), len(places))
        if at == len(axes):
            axes.append({"steps": of.step} | {key: placed[name].x for key, placed in along.items()})
        compact[name] = {"at": at, "mean": of.mean} | _band(of)
    return {"series": compact, "places": axes}


def _band(series: CurveSeries) -> dict[str, Any]:
    return {} if series.low == series.mean == series.high else {"low": series.low, "high": series.high}


def _tables(runs: Sequence[side_by_side.ReportRun]) -> list[tuple[str, str, list[side_by_side.ReportRow]]]:
    """Return the tables of the summary: their titles, notes and rows."""
    tables = [
        ("Results", "", side_by_side.compare_results(runs)),
        ("Where the time went", "medians of the training steps", side_by_side.times(runs)),
        ("Memory", "GB, the most that a process had in each phase", side_by_side.memory(runs)),
    ]
    tables = [table for table in tables if table[2]]
    if len(runs) > 1:
        tables.append(("Differences in configuration", "", side_by_side.configuration_differences(runs)))
    return tables


# --- the samples -------------------------------------------------------------------------------------------------


def samples_with_thumbnails(reader: RunReader) -> dict[str, Any]:
    """Return the first samples of the newest step that is recorded, and of the newest validation, with thumbnails.

    Nothing for a run without a rollout log.
    """
    samples: dict[str, list[dict[str, Any]]] = {}
    for purpose in PURPOSES:
        with contextlib.suppress(SamplesError):  # the log is off, or was damaged: the report has the rest
            samples[purpose] = _newest(reader, purpose)
    if not samples:
        return {}
    return {"samples": samples, **embed_thumbnails(reader.folder, [row for rows in samples.values() for row in rows])}


def _newest(reader: RunReader, purpose: Any) -> list[dict[str, Any]]:
    from tandem.observe.samples import SampleQuery, search  # Arrow takes a while to be imported

    selection = search(
        reader.folder, SampleQuery(purpose=purpose, limit=_NUM_SAMPLES_SHOWN, with_tokens=False), reader.run_id()
    )
    models, run_id = reader.models(), reader.run_id()
    places = [(selection.step, sample.scored.group, sample.scored.sample) for sample in selection.samples]
    rows = [read_sample(reader.folder, place, purpose, run_id, models) for place in places]
    return [row | {"tokens": msgspec.to_builtins(row["tokens"]), "purpose": purpose} for row in rows]
