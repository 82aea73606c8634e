"""Curves: a run's metrics and seconds by step, read once, then what is new; and their buckets.

They are read from ``curves.f64`` (`tandem.coordinator.run.curves_file`), and what is not there, as of a run of an older
release, from the journal. What was read of a metric is kept as arrays, of as many metrics as fit `_MAX_BYTES`; those
that were not asked for the longest are forgotten first, and read again when they are.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from tandem.coordinator.page.reader import RunReader
from tandem.coordinator.page.steps import Steps
from tandem.coordinator.run.curves_file import SECONDS, CurvesTable, Flags, Ids, Numbers, read_curves

_CHUNK = 1000
"""Steps read at once: a commit of the coordinator waits for no more."""
_MAX_BYTES = 256e6
_SPARSE = 400
"""Steps that are looked at for names of metrics, of a run with many, beside its newest."""


_Array = TypeVar("_Array", Ids, Numbers)


class MetricName(msgspec.Struct, frozen=True, kw_only=True):
    """A curve that there is."""

    name: str
    group: str


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A curve, or its buckets."""

    step: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


class _Column:
    """What was read of one metric."""

    def __init__(self) -> None:
        self.ids: Ids = np.zeros(0, np.int64)
        """Of steps in the journal, ascending."""
        self.values: Numbers = np.zeros(0)
        self.read_to = 0
        """The newest step that was looked at, by its id."""

    def extend(self, ids: Ids, values: Numbers, read_to: int) -> None:
        """Add what was found after `read_to`, in any order."""
        if (ids[1:] < ids[:-1]).any():
            order = np.argsort(ids, kind="stable")
            ids, values = ids[order], values[order]
        self.ids, self.values = _joined(self.ids, ids), _joined(self.values, values)
        self.read_to = read_to


class Curves:
    """All curves of one run."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._steps = Steps()
        self._columns: dict[str, _Column] = {}
        """The one that was asked for last is the last."""
        self._names: dict[str, None] = {}
        self._names_to = 0

    def names(self) -> list[MetricName]:
        """Return the curves that there are, by group and name."""
        with self._lock:
            table = read_curves(self._reader.folder)
            with self._reader.journal() as journal:
                self._read_steps(journal, table)
                self._read_names(journal, table)
            names = [MetricName(name=name, group=group_of(name)) for name in self._names]
        return sorted(names, key=lambda each: (each.group, each.name))

    def series(self, names: Iterable[str], points: int, first: int | None, last: int | None) -> dict[str, Series]:
        """Return curves from a step to another, in at most so many points each; without those that there are not."""
        found: dict[str, Series] = {}
        wanted = list(dict.fromkeys(names))
        with self._lock:
            table = read_curves(self._reader.folder)
            with self._reader.journal() as journal:
                self._read_steps(journal, table)
                self._read(journal, table, wanted)
            for name in wanted:
                steps, values = self._curve(name, first, last)
                if len(steps):
                    found[name] = bucketed(steps, values, points)
            self._forget(keep=len(wanted))
        return found

    def _curve(self, name: str, first: int | None, last: int | None) -> tuple[Ids, Numbers]:
        """Return steps that count, and what a metric was there."""
        column, known = self._columns[name], self._steps
        if np.array_equal(known.ids, column.ids):  # as of most metrics
            steps, values = known.steps, column.values
        else:
            counts = np.isin(column.ids, known.ids, assume_unique=True)
            steps = known.steps[np.searchsorted(known.ids, column.ids[counts])]
            values = column.values[counts]
        low = 0 if first is None else int(np.searchsorted(steps, first, "left"))
        high = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
        return steps[low:high], values[low:high]

    def _read_steps(self, journal: sqlite3.Connection, table: CurvesTable | None) -> None:
        """Bring the table of steps up to date; if the run was resumed, or is another, forget all."""
        if not self._steps.update(journal, table):
            self._columns, self._names, self._names_to = {}, {}, 0

    def _read(self, journal: sqlite3.Connection, table: CurvesTable | None, names: Sequence[str]) -> None:
        """Bring columns up to date, those that were read as far together."""
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
            of_journal = _from_journal(journal, alike, ids[~is_there], is_seconds=is_seconds)
            for name in alike:
                found_ids, found = of_journal[name]
                if name in of_table:
                    values, has = of_table[name]
                    found_ids, found = _joined(ids[is_there][has], found_ids), _joined(values[has], found)
                self._columns[name].extend(found_ids, found, newest)

    def _rows(self, table: CurvesTable | None, new: Flags) -> Ids:
        """Return in which row of the table each of these steps is; -1 where it is in none."""
        if table is None:
            return np.full(int(new.sum()), -1, np.int64)
        return table.rows_of(self._steps.steps[new], self._steps.committed_at[new])

    def _read_names(self, journal: sqlite3.Connection, table: CurvesTable | None) -> None:
        """Bring the names up to date: of the steps that are new, or, where these are many, of some and of the newest.

        The table has all names of the steps that are in it. Otherwise a metric that is there in few steps is most
        likely one of a validation, which comes every so many.
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
        """Forget what was asked for least lately, beyond the bytes that may be kept."""
        total = sum(column.values.nbytes + column.ids.nbytes for column in self._columns.values())
        for name in list(self._columns)[: len(self._columns) - keep]:
            if total <= _MAX_BYTES:
                return
            column = self._columns.pop(name)
            total -= column.values.nbytes + column.ids.nbytes


def _joined(first: _Array, second: _Array) -> _Array:
    """Return both, one after the other; not copied where one is empty, as mostly."""
    if not len(first) or not len(second):
        return first if len(first) else second
    return np.concatenate([first, second])


def _from_journal(
    journal: sqlite3.Connection, names: Sequence[str], wanted: Ids, *, is_seconds: bool
) -> dict[str, tuple[Ids, Numbers]]:
    """Read metrics of these steps, by their ids, which ascend; a chunk at a time."""
    prefix = SECONDS if is_seconds else ""
    columns = "phase, seconds FROM seconds" if is_seconds else "name, value FROM metrics"
    marks = ",".join("?" * len(names))
    query = f"SELECT step_id, {columns} WHERE step_id BETWEEN ? AND ? AND {columns.split(',')[0]} IN ({marks})"
    found: dict[str, tuple[list[int], list[float | None]]] = {name.removeprefix(prefix): ([], []) for name in names}
    for chunk in np.array_split(wanted, max(1, -(-len(wanted) // _CHUNK))):
        if not len(chunk):
            continue
        is_wanted = {*chunk.tolist()}
        for step_id, name, value in journal.execute(query, (int(chunk[0]), int(chunk[-1]), *found)).fetchall():
            if step_id in is_wanted:
                ids, values = found[name]
                ids.append(step_id)
                values.append(value)
    # None, SQLite's NaN, is NaN.
    return {
        prefix + name: (np.array(ids, np.int64), np.array(values, np.float64)) for name, (ids, values) in found.items()
    }


def bucketed(steps: Ids, values: Numbers, points: int) -> Series:
    """Return a curve in at most so many points: means, minima and maxima of the steps of a bucket each.

    Buckets are as wide as a power of two and begin at a multiple of it, so that what comes later changes the last one
    only, until all double. Each has the step in the middle of its steps, and leaves out values that are no numbers.
    """
    width = 1
    span = int(steps[-1] - steps[0]) + 1 if len(steps) else 0
    if len(steps) > points:
        while (int(steps[-1]) // width) - (int(steps[0]) // width) + 1 > points:
            width *= 2
    if width == 1 or not span:
        plain = values.tolist()
        return Series(step=steps.tolist(), mean=plain, low=plain, high=plain)
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    is_number = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):  # none of a bucket is a number
        mean = np.add.reduceat(np.where(is_number, values, 0.0), starts) / np.add.reduceat(is_number, starts, dtype=int)
    ends = np.append(starts[1:], len(steps))
    return Series(
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
"""A metric is of the first group one of whose words its name has; those of the first three begin or end it."""


def group_of(name: str) -> str:
    """Return the group that a metric is shown in."""
    for group, words in _GROUPS[:3]:
        if any(name.startswith(word) or (word.startswith("_") and name.endswith(word)) for word in words):
            return group
    return next((group for group, words in _GROUPS[3:] if any(word in name for word in words)), "other")
