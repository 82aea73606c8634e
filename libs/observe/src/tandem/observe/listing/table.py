"""The table of runs on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.observe.lines import clock
from tandem.observe.listing.runs import ListedRun, RunScore

_WIDTH = 200
"""Width of a table, in columns, where the output is not a terminal."""
_NONE = "-"


def print_runs(rows: Sequence[ListedRun], console: Console) -> None:
    """Print a table with a row for each run, and the problem of each that cannot be read."""
    readable = [row for row in rows if row.state is not None]
    table = new_table(console)
    table.add_column("run", overflow="fold")
    for name in ("state", "algorithm"):
        table.add_column(name, no_wrap=True)
    add_results(table, readable)
    table.add_column("begun", no_wrap=True)
    has_tags, has_notes = any(row.tags for row in readable), any(row.note for row in readable)
    for name in ["tags"] * has_tags + ["note"] * has_notes:
        table.add_column(name, overflow="fold")
    for row in readable:
        begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created_at))
        cells = [row.folder, row.state or "", row.algorithm, *results_of(row, readable), begun]
        cells += [" ".join(row.tags)] * has_tags + [row.note] * has_notes
        table.add_row(*map(Text, cells))
    if readable:
        console.print(table)
    for row in rows:
        if row.state is None:
            console.print(Text(f"{row.folder}: {row.problem}"), soft_wrap=True)


def print_combinations(keys: Sequence[str], rows: Mapping[tuple[str, ...], ListedRun], console: Console) -> None:
    """Print the table of a sweep: a row for each combination of the values of some keys."""
    runs = [*rows.values()]
    table = new_table(console)
    for key in keys:
        table.add_column(key, no_wrap=True)
    table.add_column("state", no_wrap=True)
    add_results(table, runs)
    table.add_column("run", overflow="fold")
    for values, row in rows.items():
        table.add_row(*map(Text, [*values, row.state or "not begun", *results_of(row, runs), row.folder]))
    console.print(table)


def describe_progress(row: ListedRun) -> str:
    """Return how far a run is, on one line."""
    steps = f"step {row.step}" if row.num_steps is None else f"step {row.step}/{row.num_steps}"
    score = [] if row.score is None else [f"{row.score.metric} {row.score.last:.4g} (best {format_best(row.score)})"]
    measures = [f"{name} {value:.4g}" for name in _choose_measure([row]) if (value := getattr(row, name)) is not None]
    return ", ".join([steps, *score, *measures, clock(row.seconds)])


def new_table(console: Console) -> Table:
    """Return an empty table, and give the console room for one where it is no terminal."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    return Table(box=None, header_style="bold", padding=(0, 2, 0, 0))


def add_results(table: Table, rows: Sequence[ListedRun]) -> None:
    """Add the columns of what runs have reached."""
    table.add_column("steps", justify="right", no_wrap=True)
    metrics = dict.fromkeys(row.score.metric for row in rows if row.score is not None)
    for metric in metrics:
        table.add_column(metric, justify="right", no_wrap=True)
        table.add_column("best", justify="right", no_wrap=True)
    for name in _choose_measure(rows):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)


def results_of(row: ListedRun, rows: Sequence[ListedRun]) -> list[str]:
    """Return the cells of `add_results` for one of the rows."""
    cells = [str(row.step) if row.num_steps is None else f"{row.step}/{row.num_steps}"]
    for metric in dict.fromkeys(each.score.metric for each in rows if each.score is not None):
        score = row.score if row.score is not None and row.score.metric == metric else None
        cells += [_NONE, _NONE] if score is None else [f"{score.last:.4g}", format_best(score)]
    cells += [_number(getattr(row, name)) for name in _choose_measure(rows)]
    return [*cells, clock(row.seconds) if row.seconds else _NONE]


def format_best(score: RunScore) -> str:
    """Return the best value of a metric, with its step."""
    return f"{score.best:.4g} @{score.best_step}"


def format_differences(tables: Mapping[str, Mapping[str, Iterable[str]]]) -> list[str]:
    """Return lines about the keys in which configurations differ."""
    lines = []
    for key, runs in tables.items():
        lines.append(key)
        width = max(map(len, runs))
        lines += [f"  {value:<{width}}  {', '.join(folders)}" for value, folders in runs.items()]
    return lines


def _choose_measure(rows: Sequence[ListedRun]) -> list[str]:
    """Return what the table shows beside the score: the reward, or the loss where there are no rewards."""
    return [name for name in ("reward", "loss") if any(getattr(row, name) is not None for row in rows)][:1]


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"
