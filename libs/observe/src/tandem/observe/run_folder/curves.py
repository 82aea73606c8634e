"""``curves.f64``: a copy of a run's metrics and seconds, as a table of numbers; its writer and reader.

The journal is authoritative, but it stores a metric among all others of its step. Reading one metric of 100,000 steps
takes seconds there, and milliseconds here. A row is a step: its number, its commit time, and a number for each name in
the header, which is a line of JSON padded with spaces. Readers compare the first two numbers with the journal, and
ignore rows of superseded steps or of another run. If part of the file is lost, the next resume rewrites it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from tandem.observe.run_folder.journal import StepRecord

CURVES_NAME = "curves.f64"
SECONDS = "seconds/"
"""Prefix of the names of curves of seconds, by phase."""
Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"
Ids: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Flags: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"
ABSENT = np.array([0x7FF8_0000_0AB5_E47F], np.int64)
"""Marker of a missing metric: a NaN unlike those that metrics may have."""
KEYS = 2
"""Number of columns before those of the names."""
_HEADER_BYTES = 64
"""The header's size is a multiple of this."""


class CurvesTable:
    """The current content of the file."""

    def __init__(self, names: Sequence[str], rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
        self.names = tuple(names)
        self._rows = rows
        self._place = {name: place for place, name in enumerate(names, KEYS)}

    def steps_up_to(self, last: int) -> tuple[Ids, Numbers]:
        """Return the steps up to `last`, with their commit times; of repeated steps, only the latest."""
        steps = np.array(self._rows[:, 0])
        is_asked_for = (steps >= 0) & (steps <= last)
        kept_steps, committed_at = steps[is_asked_for].astype(np.int64), np.array(self._rows[:, 1])[is_asked_for]
        if not len(kept_steps):
            return kept_steps, committed_at
        least_later = np.minimum.accumulate(kept_steps[::-1])[::-1][1:]
        stays = np.append(kept_steps[:-1] < least_later, True)
        return kept_steps[stays], committed_at[stays]

    def rows_of(self, steps: Ids, committed_at: Numbers) -> Ids:
        """Return the row of each of these steps; -1 for missing ones."""
        at = np.array(self._rows[:, 1])
        if np.array_equal(at, committed_at) and np.array_equal(self._rows[:, 0], steps):
            return np.arange(len(steps))
        order = np.argsort(at, kind="stable")
        if not len(order):
            return np.full(len(steps), -1, np.int64)
        places = np.searchsorted(at[order], committed_at)
        row = order[np.minimum(places, len(order) - 1)]
        return np.where((at[row] == committed_at) & (self._rows[row, 0] == steps), row, -1)

    def columns(self, names: Sequence[str], rows: Ids) -> dict[str, tuple[Numbers, Flags]]:
        """Return the values of these metrics in these rows, and where they exist; the file is read once."""
        existing = [name for name in names if name in self._place]
        places = [self._place[name] for name in existing]
        is_range = len(rows) > 0 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
        which = self._rows[rows[0] : rows[-1] + 1] if is_range else self._rows[rows]
        values = np.ascontiguousarray(which[:, places].T)
        column_of = {
            name: (column, column.view(np.int64) != ABSENT) for name, column in zip(existing, values, strict=True)
        }
        return {name: column_of.get(name, (np.zeros(len(rows)), np.zeros(len(rows), np.bool_))) for name in names}


def read_curves(folder: Path) -> CurvesTable | None:
    """Return the content of the file; None if there is none, or it is unreadable."""
    try:
        with (folder / CURVES_NAME).open("rb") as file:
            line = file.readline()
            names = msgspec.json.decode(line, type=tuple[str, ...])
            num_rows = (os.fstat(file.fileno()).st_size - len(line)) // row_bytes(names)
            if not num_rows:
                return CurvesTable(names, np.zeros((0, KEYS + len(names))))
            # An incomplete row, being written or left by a killed writer, is ignored.
            shape = (num_rows, KEYS + len(names))
            return CurvesTable(names, np.memmap(file, np.float64, mode="r", offset=len(line), shape=shape))
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def row_bytes(names: Sequence[str]) -> int:
    """Return the size of a row with these metrics."""
    return 8 * (KEYS + len(names))


class CurvesFile:
    """The only writer of the file. Every method may raise `OSError`, after which the writer is unusable."""

    def __init__(self, folder: Path, history: Sequence[StepRecord]) -> None:
        """Continue the file if it has all of `history`; rewrite it otherwise."""
        self._path = folder / CURVES_NAME
        table = read_curves(folder)
        if table is None or not _has_all(table, history):
            self._names = tuple(dict.fromkeys(name for record in history for name in _values(record)))
            self._begin([_row(record, _values(record), self._names) for record in history])
            return
        self._names = table.names
        self._file = self._path.open("r+b", buffering=0)
        size = self._path.stat().st_size
        header = len(_header(self._names))
        self._file.truncate(size - (size - header) % row_bytes(self._names))
        self._file.seek(0, os.SEEK_END)

    def append(self, record: StepRecord) -> None:
        """Write a step; if it has a new metric, rewrite all rows."""
        values = _values(record)
        if values.keys() - set(self._names):
            self._begin(self._read_rows(values))
        self._file.write(_row(record, values, self._names))

    def amend(self, record: StepRecord) -> None:
        """Write a step again where it stands, with metrics that it did not have: rewrite all rows."""
        values = _values(record)
        rows = self._read_rows(values)
        keys = _row(record, {}, ())
        self._begin([_row(record, values, self._names) if row.startswith(keys) else row for row in rows])

    def _read_rows(self, values: Mapping[str, float]) -> list[bytes]:
        """Return the rows, with columns for all of these names, and close the file."""
        table, new = read_curves(self._path.parent), values.keys() - set(self._names)
        self._names += tuple(filter(new.__contains__, values))  # in their order
        self._file.close()
        absent = np.repeat(ABSENT, len(new)).tobytes()
        return [] if table is None else [row.tobytes() + absent for row in table._rows]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin(self, rows: Iterable[bytes]) -> None:
        """Write the whole file, and leave it open for appending."""
        temporary = self._path.with_name(f".{CURVES_NAME}")
        self._file = temporary.open("w+b", buffering=0)
        try:
            self._file.write(_header(self._names) + b"".join(rows))
            temporary.rename(self._path)
        except BaseException:
            self._file.close()
            raise


def _has_all(table: CurvesTable, history: Sequence[StepRecord]) -> bool:
    steps = np.array([record.step for record in history], np.int64)
    at = np.array([record.committed_at for record in history], np.float64)
    return bool((table.rows_of(steps, at) >= 0).all())


def _values(record: StepRecord) -> dict[str, float]:
    values = dict(record.metrics)
    for phase, seconds in record.seconds.items():
        values[SECONDS + phase] = seconds
    return values


def _row(record: StepRecord, values: Mapping[str, float], names: Sequence[str]) -> bytes:
    row = np.array([record.step, record.committed_at, *map(values.get, names, itertools.repeat(0.0))], np.float64)
    is_absent = ~np.fromiter(map(values.__contains__, names), np.bool_, len(names))
    row[KEYS:].view(np.int64)[is_absent] = ABSENT
    return row.tobytes()


def _header(names: Sequence[str]) -> bytes:
    line = msgspec.json.encode(names)
    return line.ljust(-(-(len(line) + 1) // _HEADER_BYTES) * _HEADER_BYTES - 1) + b"\n"
