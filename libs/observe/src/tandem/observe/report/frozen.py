"""The page of runs as one HTML file: its own front end, which finds the runs' data within the file.

The file loads nothing and links to nothing, and so opens without a server or a network. All that users and models wrote
is data, which the front end shows as text. The file's policy lets a browser run only the scripts that are in it.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from tandem.observe import page
from tandem.observe.page.reader import RunReader
from tandem.observe.page.series import Along, CurveSeries, RunCurves
from tandem.observe.report.side_by_side import (
    ReportRow,
    ReportRun,
    compare_results,
    configuration_differences,
    memory,
    times,
)
from tandem.observe.timeline import flame, timeline

_STATIC = Path(page.__file__).parent / "static"
_IMAGES = "images"
"""Folder of a run's images; only a vision model has one."""
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


def frozen_page(runs: Sequence[ReportRun]) -> str:
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


def _data(index: int, run: ReportRun) -> dict[str, Any]:
    """Return what ``frozen/api.js`` answers of a run."""
    reader = RunReader(run.folder)
    curves = RunCurves(reader)
    metrics = curves.names()
    view = timeline(run.folder, _NUM_STEPS, None)
    pictures: dict[str, Any] = {}
    if (run.folder / _IMAGES).is_dir():  # of a vision model
        from tandem.observe.report.pictures import samples_with_pictures

        pictures = samples_with_pictures(reader)
    return {
        "summary": msgspec.structs.replace(reader.summary(index), name=run.label, path=run.label),
        "metrics": metrics,
        **_curves(curves, [metric.name for metric in metrics]),
        "config": reader.configuration(),
        "refits": reader.refits(_NUM_REFITS),
        "events": reader.events(0, _NUM_EVENTS),
        "timeline": view,
        "flames": {step.step: flame(run.folder, step.step, reader.step_seconds) for step in view.steps},
        **pictures,
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


def _tables(runs: Sequence[ReportRun]) -> list[tuple[str, str, list[ReportRow]]]:
    """Return the tables of the summary: their titles, notes and rows."""
    tables = [
        ("Results", "", compare_results(runs)),
        ("Where the time went", "medians of the training steps", times(runs)),
        ("Memory", "GB, the most that a process had in each phase", memory(runs)),
    ]
    tables = [table for table in tables if table[2]]
    if len(runs) > 1:
        tables.append(("Differences in configuration", "", configuration_differences(runs)))
    return tables
