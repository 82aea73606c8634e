"""A report as one HTML file that loads nothing and links to nothing.

All text written by models or users is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from tandem.observe.report.charts import Line, key, layer_chart, layer_key, line_chart
from tandem.observe.report.figure import stacked_seconds
from tandem.observe.report.panels import SECONDS, Panel, panels_of
from tandem.observe.report.side_by_side import Row, Run, configuration_differences, memory, reached, times

_NUM_COLOURS = 10
_NUM_NOTES = 40
"""Number of lines shown of a run's events, the newest."""
_LONGEST_NOTE = 400

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --dim: #667085; --rule: #d9dee7; --paper: #ffffff; --card: #f7f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --dim: #98a2b3; --rule: #344054; --paper: #14181f; --card: #1c222b }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1200px; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .25rem } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem }
h3 { font-size: .95rem; margin: 0 0 .3rem } p { margin: .3rem 0; color: var(--dim) }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem }
section.panel { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .7rem .8rem }
.chart { display: block; width: 100%; height: auto } .chart text { font-size: 11px; fill: var(--dim) }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .8rem; color: var(--dim) }
.key { margin-right: .35rem; vertical-align: middle }
.grid { stroke: var(--rule); stroke-width: 1 } path { fill: none; stroke-width: 1.6; stroke-linejoin: round }
.missing { display: grid; place-items: center; min-height: 9rem }
.d1 { stroke-dasharray: 6 3 } .d2 { stroke-dasharray: 2 3 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .88rem }
th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: anywhere; min-width: 7rem; font-variant-numeric: tabular-nums }
th { font-weight: 600; color: var(--dim) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; background: var(--card);
  border: 1px solid var(--rule); border-radius: 8px; padding: .7rem .8rem }
"""
_PALETTE = ("2f6fde", "e07b24", "2e9e5b", "c9433f", "8a5bc7", "8f6a4f", "d25fa8", "808891", "a8a52c", "2ba6bd")


def page(runs: Sequence[Run]) -> str:
    """Return the whole page."""
    title = escape(", ".join(run.label for run in runs))
    colours = "".join(
        f".c{i} {{ stroke: #{c} }} .c{i}.fill, circle.c{i} {{ fill: #{c}; stroke: none }}"
        for i, c in enumerate(_PALETTE)
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
        f"<title>{title}</title><style>{_STYLE}{colours}</style></head><body>",
        f"<h1>{title}</h1>",
        f"<p>{escape(_subtitle(runs))}</p>",
        "<h2>Results</h2>",
        _table(runs, reached(runs)),
        '<h2>Curves</h2><div class="panels">',
        *(_panel(panel, runs) for panel in panels_of(run.summary.algorithm for run in runs)),
        "</div>",
        "<h2>Where the time went</h2><p>medians of the training steps</p>",
        _table(runs, times(runs)),
        *_memory(runs),
        *_differences(runs),
        *_notes(runs),
        "</body></html>",
    ]
    return "\n".join(parts)


def _subtitle(runs: Sequence[Run]) -> str:
    return "; ".join(f"{run.label}: {run.summary.algorithm.upper()}, run {run.record.run_id}" for run in runs)


def _panel(panel: Panel, runs: Sequence[Run]) -> str:
    chart, legend = _layers(runs[0]) if panel.title == SECONDS and len(runs) == 1 else _lines(panel, runs)
    title = f'<section class="panel"><h3>{escape(panel.title)}</h3>'
    if not chart:
        return f'{title}<p class="missing">{escape(panel.missing)}</p></section>'
    return f'{title}{chart}<div class="legend">{legend}</div></section>'


def _lines(panel: Panel, runs: Sequence[Run]) -> tuple[str, str]:
    """Return a chart of curves and its legend; several runs differ in colour, as do the curves of a single run."""
    left, right = panel.drawn([run.curves for run in runs])
    lines = [
        Line(
            label=(curve.label if len(runs) == 1 else f"{run.label}: {curve.label}")
            + (" (right)" if left and curve in right else ""),
            points=run.curves.get(curve.name, []),
            colour=(place if len(runs) > 1 else number) % _NUM_COLOURS,
            dash=number % 3,
            is_right=curve in right,
        )
        for number, curve in enumerate([*left, *right])
        for place, run in enumerate(runs)
    ]
    lines = [line for line in lines if line.points]
    return line_chart(lines), "".join(f"<span>{key(line)}{escape(line.label)}</span>" for line in lines)


def _layers(run: Run) -> tuple[str, str]:
    """Return a chart of a run's seconds by phase, and its legend."""
    layers = stacked_seconds(run.summary)
    steps = [step for step, _ in run.summary.seconds.get("total", [])]
    legend = "".join(f"<span>{layer_key(number)}{escape(name)}</span>" for number, name in enumerate(layers))
    return layer_chart(steps, [*layers.values()]), legend


def _memory(runs: Sequence[Run]) -> Iterator[str]:
    rows = memory(runs)
    if rows:
        yield "<h2>Memory</h2><p>GB, the most that a process had in each phase</p>"
        yield _table(runs, rows)


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    if len(runs) == 1:
        return
    rows = configuration_differences(runs)
    yield "<h2>Differences in configuration</h2>"
    yield _table(runs, rows) if rows else "<p>none but the folders</p>"


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        lines = [text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE]} …" for _, text in run.notes]
        if lines:
            yield f"<h2>Console{f' in {escape(run.label)}' if len(runs) > 1 else ''}</h2>"
            if len(lines) > _NUM_NOTES:
                yield f"<p>the last {_NUM_NOTES} of {len(lines)} lines</p>"
            yield f"<pre>{escape(chr(10).join(lines[-_NUM_NOTES:]))}</pre>"


def _table(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(run.label)}</th>" for run in runs)
    body = "".join(
        f"<tr><th>{escape(row.what)}</th>{''.join(f'<td>{escape(value)}</td>' for value in row.values)}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'
