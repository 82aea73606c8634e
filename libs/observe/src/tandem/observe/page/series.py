"""Curves: a run's metrics and seconds by step, read incrementally, their buckets, and all as CSV.

They come from ``curves.f64`` (`tandem.observe.run_folder.curves`), and otherwise from the journal, as for runs of
older releases. Metrics are cached as arrays, up to `_MAX_BYTES`. Those least recently requested are dropped first, and
read again when they are needed.

The journal lists the valid steps, but fetching 100,000 of its rows takes half a second on a busy machine. So they are
taken from ``curves.f64`` where possible, which a few rows can show. Its only writer appends nothing after a row that
it could not write, and rewrites the file if it was incomplete when the run was resumed. So contiguous rows equal the
journal's if the first and the last do.
"""

from __future__ import annotations

import csv
import io
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from tandem.observe.page.reader import RunReader
from tandem.observe.run_folder.curves import SECONDS, CurvesTable, Flags, Ids, Numbers, read_curves
from tandem.observe.run_folder.journal import LATE_METRICS

_CHUNK = 1000
"""Steps read at once, so that the coordinator's commits wait no longer than that."""
_MAX_BYTES = 256e6
_SPARSE = 400
"""Steps sampled for names of metrics in a long run, beside its newest."""


_Array = TypeVar("_Array", Ids, Numbers)
_MOST_COMPARED = 256
"""Steps of the file, from the first to the last, that are compared with the journal."""
_COUNTS = "superseded_at IS NULL"


class PageSteps:
    """All valid steps, in order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._run_id = ""
        self._forget()

    def _forget(self) -> None:
        self.ids: Ids = np.zeros(0, np.int64)
        """Ids in the journal, ascending."""
        self.steps: Ids = np.zeros(0, np.int64)
        self.committed_at: Numbers = np.zeros(0)

    @property
    def newest(self) -> int:
        """Id of the newest step; 0 if there is none."""
        return int(self.ids[-1]) if len(self.ids) else 0

    def update(self, journal: sqlite3.Connection, table: CurvesTable | None) -> bool:
        """Read new steps; return whether they continue the known ones.

        They do not if the run was resumed from an earlier step, or is another; then everything was read again. `table`
        was read before, and helps if nothing is known yet.
        """
        (run_id,) = journal.execute("SELECT run_id FROM run").fetchone()
        goes_on = run_id == self._run_id and self._still_counts(journal)
        if not goes_on:
            self._run_id = run_id
            self._forget()
        if table is not None and not len(self.ids):
            self._take(journal, table)
        query = f"SELECT id, step, committed_at FROM steps WHERE id > ? AND {_COUNTS} ORDER BY id"
        rows = journal.execute(query, (self.newest,)).fetchall()
        if rows:
            ids, steps, committed_at = zip(*rows, strict=True)
            self.ids = np.concatenate([self.ids, np.array(ids, np.int64)])
            self.steps = np.concatenate([self.steps, np.array(steps, np.int64)])
            self.committed_at = np.concatenate([self.committed_at, np.array(committed_at, np.float64)])
        return goes_on

    def _still_counts(self, journal: sqlite3.Connection) -> bool:
        """Return whether the newest step is still valid: a resume that repeats steps invalidates the newest first."""
        query = f"SELECT count(*) FROM steps WHERE id = ? AND {_COUNTS}"
        return not len(self.ids) or bool(journal.execute(query, (self.newest,)).fetchone()[0])

    def _take(self, journal: sqlite3.Connection, table: CurvesTable) -> None:
        """Take the steps of the file, if they are the journal's up to the file's last one."""
        (last,) = journal.execute(f"SELECT max(step) FROM steps WHERE {_COUNTS}").fetchone()
        steps, committed_at = table.steps_up_to(last or 0)
        if not len(steps) or steps[-1] - steps[0] + 1 != len(steps):
            return
        places = np.unique(np.linspace(0, len(steps) - 1, _MOST_COMPARED).round().astype(np.int64))
        compared = dict(zip(steps[places].tolist(), committed_at[places].tolist(), strict=True))
        marks = ",".join("?" * len(compared))
        query = f"SELECT step, committed_at, id FROM steps WHERE {_COUNTS} AND step IN ({marks}) ORDER BY step"
        rows = journal.execute(query, [*compared]).fetchall()
        if {step: at for step, at, _ in rows} != compared:
            return
        newest = rows[-1][2]
        query = "SELECT id FROM steps WHERE superseded_at IS NOT NULL AND id <= ?"
        superseded = [row[0] for row in journal.execute(query, (newest,))]
        ids = np.setdiff1d(np.arange(1, newest + 1), superseded, assume_unique=True)
        if len(ids) == len(steps):
            self.ids, self.steps, self.committed_at = ids, steps, committed_at


class MetricName(msgspec.Struct, frozen=True, kw_only=True):
    """The name of an existing curve."""

    name: str
    group: str


Along = Literal["steps", "tokens", "time"]
"""Horizontal axis of curves: steps, tokens generated so far, or seconds of the steps so far."""
_TOTAL, _TOKEN_RATE = f"{SECONDS}total", "tokens_per_s"
_MEASURED: dict[Along, list[str]] = {"steps": [], "tokens": [_TOTAL, _TOKEN_RATE], "time": [_TOTAL]}
"""Metrics that measure an axis."""


class CurveSeries(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A curve, or its buckets."""

    step: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    x: list[float] | None = None
    """Position of each step along tokens or time, if requested and known."""


class _Column:
    """The cached values of one metric."""

    def __init__(self) -> None:
        self.ids: Ids = np.zeros(0, np.int64)
        """Ids of steps in the journal, ascending."""
        self.values: Numbers = np.zeros(0)
        self.read_to = 0
        """Id of the newest step that was examined."""

    def extend(self, ids: Ids, values: Numbers, read_to: int) -> None:
        """Add values found after `read_to`, in any order."""
        if (ids[1:] < ids[:-1]).any():
            order = np.argsort(ids, kind="stable")
            ids, values = ids[order], values[order]
        self.ids, self.values = _concatenate(self.ids, ids), _concatenate(self.values, values)
        self.read_to = read_to


class RunCurves:
    """All curves of one run."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._steps = PageSteps()
        self._columns: dict[str, _Column] = {}
        """Cached columns; the last one is the most recently requested."""
        self._names: dict[str, None] = {}
        self._names_to = 0
        self._last_event = 0
        """Newest event of the journal that was looked at."""

    def names(self) -> list[MetricName]:
        """Return the names of existing curves, by group and name."""
        with self._lock:
            table = read_curves(self._reader.folder)
            with self._reader.journal() as journal:
                self._read_steps(journal, table)
                self._read_names(journal, table)
            names = [MetricName(name=name, group=group_of(name)) for name in self._names]
        return sorted(names, key=lambda metric: (metric.group, metric.name))

    def series(
        self, names: Iterable[str], points: int, first: int | None, last: int | None, along: Along = "steps"
    ) -> dict[str, CurveSeries]:
        """Return the existing curves between two steps, with at most `points` points each."""
        curves: dict[str, CurveSeries] = {}
        metrics = list(dict.fromkeys(names))
        with self._lock:
            places = self._read_all(metrics, along)
            for name in metrics:
                steps, values = self._curve(name, first, last)
                if len(steps):
                    curves[name] = make_buckets(steps, values, points)
                    if places is not None:
                        curves[name] = _add_places(curves[name], *places)
            self._forget(keep=len(metrics) + len(_MEASURED[along]))
        return curves

    def read_all_points(
        self, names: Iterable[str], first: int | None, last: int | None, along: Along = "steps"
    ) -> dict[str, tuple[Numbers, Numbers]]:
        """Return the existing curves between two steps with all of their points: places along the axis, and values."""
        curves: dict[str, tuple[Numbers, Numbers]] = {}
        metrics = list(dict.fromkeys(names))
        with self._lock:
            places = self._read_all(metrics, along)
            for name in metrics:
                steps, values = self._curve(name, first, last)
                if len(steps):
                    curves[name] = (steps.astype(np.float64) if places is None else _place(steps, *places), values)
            self._forget(keep=len(metrics) + len(_MEASURED[along]))
        return curves

    def _read_all(self, metrics: Sequence[str], along: Along) -> tuple[Ids, Numbers] | None:
        """Read metrics, and those that measure the axis; return the latter's places, if any."""
        measured = _MEASURED[along]
        table = read_curves(self._reader.folder)
        with self._reader.journal() as journal:
            self._read_steps(journal, table)
            self._read(journal, table, list(dict.fromkeys([*measured, *metrics])))
        return self._places(measured) if measured else None

    def _places(self, measured: Sequence[str]) -> tuple[Ids, Numbers] | None:
        """Return steps and the cumulative seconds or tokens up to each; None if there are none."""
        steps, seconds = self._curve(_TOTAL, None, None)
        if _TOKEN_RATE in measured:
            its_steps, rates = self._curve(_TOKEN_RATE, None, None)
            is_timed = np.isin(its_steps, steps)
            its_steps, rates = its_steps[is_timed], rates[is_timed]
            steps, seconds = its_steps, rates * seconds[np.searchsorted(steps, its_steps)]
        return (steps, np.nancumsum(seconds)) if len(steps) else None

    def _curve(self, name: str, first: int | None, last: int | None) -> tuple[Ids, Numbers]:
        """Return a metric's values at valid steps."""
        column, counted = self._columns[name], self._steps
        if np.array_equal(counted.ids, column.ids):  # true of most metrics
            steps, values = counted.steps, column.values
        else:
            counts = np.isin(column.ids, counted.ids, assume_unique=True)
            steps = counted.steps[np.searchsorted(counted.ids, column.ids[counts])]
            values = column.values[counts]
        low = 0 if first is None else int(np.searchsorted(steps, first, "left"))
        high = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
        return steps[low:high], values[low:high]

    def _read_steps(self, journal: sqlite3.Connection, table: CurvesTable | None) -> None:
        """Update the table of steps; if the run was resumed, or is another, drop everything cached.

        So it is where steps have more metrics than they had when they were read.
        """
        query = "SELECT max(id), max(member = ?) FROM events WHERE id > ?"
        newest, has_more = journal.execute(query, (LATE_METRICS, self._last_event)).fetchone()
        self._last_event = self._last_event if newest is None else newest
        continues = self._steps.update(journal, table)
        if not continues:
            self._last_event = 0
        if not continues or has_more:
            self._columns, self._names, self._names_to = {}, {}, 0

    def _read(self, journal: sqlite3.Connection, table: CurvesTable | None, names: Sequence[str]) -> None:
        """Update columns, reading those that are equally old together."""
        together: dict[tuple[bool, int], list[str]] = {}
        newest = self._steps.newest
        for name in names:
            column = self._columns.pop(name) if name in self._columns else _Column()
            self._columns[name] = column
            if column.read_to < newest:
                together.setdefault((name.startswith(SECONDS), column.read_to), []).append(name)
        for (is_seconds, read_to), alike in together.items():
            new = self._steps.ids > read_to
            rows = self._rows(table, new)
            is_there, ids = rows >= 0, self._steps.ids[new]
            of_table = {} if table is None else table.columns(alike, rows[is_there])
            of_journal = _read_from_journal(journal, alike, ids[~is_there], is_seconds=is_seconds)
            for name in alike:
                found_ids, new_values = of_journal[name]
                if name in of_table:
                    values, has = of_table[name]
                    found_ids, new_values = (
                        _concatenate(ids[is_there][has], found_ids),
                        _concatenate(values[has], new_values),
                    )
                self._columns[name].extend(found_ids, new_values, newest)

    def _rows(self, table: CurvesTable | None, new: Flags) -> Ids:
        """Return the row of each of these steps in the table; -1 for missing ones."""
        if table is None:
            return np.full(int(new.sum()), -1, np.int64)
        return table.rows_of(self._steps.steps[new], self._steps.committed_at[new])

    def _read_names(self, journal: sqlite3.Connection, table: CurvesTable | None) -> None:
        """Update the names from the new steps or, if these are many, from some of them and the newest.

        The table has all names of its own steps. Elsewhere, a metric in few steps is most likely one of validation,
        which happens at regular intervals.
        """
        newer = self._steps.ids > self._names_to
        if not newer.any():
            return
        new = self._steps.ids[newer][self._rows(table, newer) < 0]
        if table is not None and len(new) < newer.sum():
            self._names |= dict.fromkeys(table.names)
        if len(new) > 4 * _SPARSE:
            every = max(1, len(new) // _SPARSE)
            sparse = {*new[:_SPARSE].tolist(), *new[::every].tolist(), *new[-_SPARSE:].tolist()}
            sparse.update(self._round_steps(len(new)))
            new = np.array(sorted(sparse), np.int64)
        for ids in np.array_split(new, max(1, len(new) // _CHUNK)):
            marks = ",".join("?" * len(ids))
            for place, column, prefix in (("metrics", "name", ""), ("seconds", "phase", SECONDS)):
                query = f"SELECT DISTINCT {column} FROM {place} WHERE step_id IN ({marks})"
                self._names |= {prefix + name: None for (name,) in journal.execute(query, ids.tolist())}
        self._names_to = self._steps.newest

    def _round_steps(self, count: int) -> list[int]:
        """Return ids of steps with round numbers, at which runs validate and save."""
        width = 10 ** max(1, len(str(count // _SPARSE)))
        rounded: list[int] = self._steps.ids[self._steps.steps % width == 0].tolist()
        return rounded[-2 * _SPARSE :]

    def _forget(self, keep: int) -> None:
        """Drop the least recently requested columns beyond the limit of bytes."""
        total = sum(column.values.nbytes + column.ids.nbytes for column in self._columns.values())
        for name in list(self._columns)[: len(self._columns) - keep]:
            if total <= _MAX_BYTES:
                return
            column = self._columns.pop(name)
            total -= column.values.nbytes + column.ids.nbytes


def _add_places(series: CurveSeries, steps: Ids, sums: Numbers) -> CurveSeries:
    """Add the cumulative sum up to each step of a curve."""
    return msgspec.structs.replace(series, x=_place(np.array(series.step), steps, sums).tolist())


def _place(curve_steps: Ids, steps: Ids, sums: Numbers) -> Numbers:
    """Return the cumulative sum up to each of these steps."""
    before = np.searchsorted(steps, curve_steps, "right")
    return np.concatenate([[0.0], sums])[before]


def _concatenate(first: _Array, second: _Array) -> _Array:
    """Return both, one after the other, without a copy if one is empty, as is usual."""
    if not len(first) or not len(second):
        return first if len(first) else second
    return np.concatenate([first, second])


def _read_from_journal(
    journal: sqlite3.Connection, names: Sequence[str], step_ids: Ids, *, is_seconds: bool
) -> dict[str, tuple[Ids, Numbers]]:
    """Read metrics of the steps with these ascending ids, in chunks."""
    prefix = SECONDS if is_seconds else ""
    columns = "phase, seconds FROM seconds" if is_seconds else "name, value FROM metrics"
    marks = ",".join("?" * len(names))
    query = f"SELECT step_id, {columns} WHERE step_id BETWEEN ? AND ? AND {columns.split(',')[0]} IN ({marks})"
    points_of: dict[str, tuple[list[int], list[float | None]]] = {name.removeprefix(prefix): ([], []) for name in names}
    for chunk in np.array_split(step_ids, max(1, -(-len(step_ids) // _CHUNK))):
        if not len(chunk):
            continue
        is_wanted = {*chunk.tolist()}
        for step_id, name, value in journal.execute(query, (int(chunk[0]), int(chunk[-1]), *points_of)).fetchall():
            if step_id in is_wanted:
                ids, values = points_of[name]
                ids.append(step_id)
                values.append(value)
    # None, SQLite's NaN, becomes NaN.
    return {
        prefix + name: (np.array(ids, np.int64), np.array(values, np.float64))
        for name, (ids, values) in points_of.items()
    }


def make_buckets(steps: Ids, values: Numbers, points: int) -> CurveSeries:
    """Return a curve with at most `points` points: means, minima and maxima of buckets of steps.

    A bucket's width is a power of two, and its start a multiple of that. So new steps change only the last bucket,
    until all widths double. Each point is at the middle step of its bucket, and NaN values are left out.
    """
    width = 1
    span = int(steps[-1] - steps[0]) + 1 if len(steps) else 0
    if len(steps) > points:
        while (int(steps[-1]) // width) - (int(steps[0]) // width) + 1 > points:
            width *= 2
    if width == 1 or not span:
        plain = values.tolist()
        return CurveSeries(step=steps.tolist(), mean=plain, low=plain, high=plain)
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    is_number = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):  # a bucket may have no numbers
        mean = np.add.reduceat(np.where(is_number, values, 0.0), starts) / np.add.reduceat(is_number, starts, dtype=int)
    ends = np.append(starts[1:], len(steps))
    return CurveSeries(
        step=steps[(starts + ends - 1) // 2].tolist(),
        mean=mean.tolist(),
        low=np.fmin.reduceat(values, starts).tolist(),
        high=np.fmax.reduceat(values, starts).tolist(),
    )


_GROUPS = (
    ("seconds", ("seconds/", "_per_s", "_s")),
    ("validation", ("val_",)),
    ("memory", ("memory_",)),
    ("gpu", ("gpu",)),
    ("ages", ("age", "idle", "too_old", "in_store", "stale")),
    ("lengths", ("length", "truncat", "turns", "tokens", "finished")),
    ("loss", ("loss", "grad", "lr", "learning_rate", "nll")),
    ("policy", ("kl", "entropy", "ratio", "clip", "logprob", "prob", "error", "sampling")),
    ("reward", ("reward", "accuracy", "advantage", "correct", "baseline", "informative", "score", "component")),
)
"""Groups by words in a metric's name: the first match counts; words of the first three groups begin or end the name."""


def group_of(name: str) -> str:
    """Return the group under which a metric is shown."""
    for group, words in _GROUPS[:3]:
        if any(name.startswith(word) or (word.startswith("_") and name.endswith(word)) for word in words):
            return group
    return next((group for group, words in _GROUPS[3:] if any(word in name for word in words)), "other")


_AXES: dict[Along, str] = {"steps": "step", "tokens": "tokens", "time": "seconds"}
_ROWS = 5000
"""Rows written at once."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that spreadsheets would compute."""


class CurveColumn(NamedTuple):
    """A curve as a column of the file."""

    label: str
    places: Numbers
    """Places along the axis, ascending."""
    values: Numbers


def csv_parts(along: Along, columns: Sequence[CurveColumn]) -> Iterator[str]:
    """Yield the file: a line of names, then a row for each place at which any curve has a value."""
    yield _lines([[_AXES[along], *(_safe(column.label) for column in columns)]])
    places = np.unique(np.concatenate([column.places for column in columns])) if columns else np.zeros(0)
    for part in np.array_split(places, max(1, -(-len(places) // _ROWS))):
        if len(part):
            yield _lines(zip(map(_number, part.tolist()), *(_cells(column, part) for column in columns), strict=True))


def _cells(column: CurveColumn, places: Numbers) -> list[str]:
    """Return a column's values at these places; empty where it has none, and for NaN."""
    first, last = np.searchsorted(column.places, [places[0], places[-1]], "left")
    column_places, values = column.places[first : last + 1], column.values[first : last + 1]
    cells = [""] * len(places)
    for place, value in zip(np.searchsorted(places, column_places).tolist(), values.tolist(), strict=True):
        cells[place] = "" if value != value else _number(value)
    return cells


def _number(value: float) -> str:
    """Return a number with all of its digits."""
    return repr(value).removesuffix(".0")


def _safe(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text


def _lines(rows: Iterator[tuple[str, ...]] | list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
