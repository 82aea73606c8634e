"""``curves.f64``: a run's metrics and seconds once more, as a table of numbers that is read at once.

The journal is what counts. There a metric lies among all others of its step, and to read one of 100,000 steps takes
seconds; here it takes milliseconds. A row is a step: its number, when it was committed, and a number for each name of
the header, a line of JSON that spaces fill up. Who reads it compares the first two with the journal, so that a row of a
step that was done over again, or of another run, is none. What is lost of the file is written anew on the next resume.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from tandem.observe.run_folder.journal import StepRecord

CURVES_NAME = "curves.f64"
SECONDS = "seconds/"
"""Begins the name of the curve of a phase's seconds."""
Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"
Ids: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Flags: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"

_ABSENT = np.array([0x7FF8_0000_0AB5_E47F], np.int64)
"""What there is for a metric that a step has not: not a number, and not the one that a metric may be."""
_KEYS = 2
"""Columns before those of the names."""
_HEADER_BYTES = 64
"""The header is a multiple of it."""


class CurvesTable:
    """The file as it is now."""

    def __init__(self, names: Sequence[str], rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
        self.names = tuple(names)
        self._rows = rows
        self._place = {name: place for place, name in enumerate(names, _KEYS)}

    def steps_up_to(self, last: int) -> tuple[Ids, Numbers]:
        """Return the steps up to one, and when they were committed; of those done over again only the last time."""
        steps = np.array(self._rows[:, 0])
        is_asked_for = (steps >= 0) & (steps <= last)
        found, committed_at = steps[is_asked_for].astype(np.int64), np.array(self._rows[:, 1])[is_asked_for]
        if not len(found):
            return found, committed_at
        least_later = np.minimum.accumulate(found[::-1])[::-1][1:]
        stays = np.append(found[:-1] < least_later, True)
        return found[stays], committed_at[stays]

    def rows_of(self, steps: Ids, committed_at: Numbers) -> Ids:
        """Return in which row each of these steps is; -1 where it is in none."""
        at = np.array(self._rows[:, 1])
        if np.array_equal(at, committed_at) and np.array_equal(self._rows[:, 0], steps):
            return np.arange(len(steps))
        order = np.argsort(at, kind="stable")
        if not len(order):
            return np.full(len(steps), -1, np.int64)
        found = np.searchsorted(at[order], committed_at)
        row = order[np.minimum(found, len(order) - 1)]
        return np.where((at[row] == committed_at) & (self._rows[row, 0] == steps), row, -1)

    def columns(self, names: Sequence[str], rows: Ids) -> dict[str, tuple[Numbers, Flags]]:
        """Return what each of these metrics is in these rows, and where it is: all are read in one go over the file."""
        there = [name for name in names if name in self._place]
        places = [self._place[name] for name in there]
        is_range = len(rows) > 0 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
        which = self._rows[rows[0] : rows[-1] + 1] if is_range else self._rows[rows]
        values = np.ascontiguousarray(which[:, places].T)
        found = {name: (own, own.view(np.int64) != _ABSENT) for name, own in zip(there, values, strict=True)}
        return {name: found.get(name, (np.zeros(len(rows)), np.zeros(len(rows), np.bool_))) for name in names}


def read_curves(folder: Path) -> CurvesTable | None:
    """Return what is in the file; None if there is none, or none that can be read."""
    try:
        with (folder / CURVES_NAME).open("rb") as file:
            line = file.readline()
            names = msgspec.json.decode(line, type=tuple[str, ...])
            whole = (os.fstat(file.fileno()).st_size - len(line)) // _row_bytes(names)
            if not whole:
                return CurvesTable(names, np.zeros((0, _KEYS + len(names))))
            # A row that is being written, or was when the writer was killed, is none.
            shape = (whole, _KEYS + len(names))
            return CurvesTable(names, np.memmap(file, np.float64, mode="r", offset=len(line), shape=shape))
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


class CurvesFile:
    """The one writer of the file. Every method raises `OSError`; then it is good for nothing more."""

    def __init__(self, folder: Path, history: Sequence[StepRecord]) -> None:
        """Go on with what is there, if that is all of `history`; write it anew otherwise."""
        self._path = folder / CURVES_NAME
        table = read_curves(folder)
        if table is None or not _has_all(table, history):
            self._names: tuple[str, ...] = tuple(dict.fromkeys(name for record in history for name in _values(record)))
            self._begin([_row(record, self._names) for record in history])
            return
        self._names = table.names
        self._file = self._path.open("r+b", buffering=0)
        size = self._path.stat().st_size
        header = len(_header(self._names))
        self._file.truncate(size - (size - header) % _row_bytes(self._names))
        self._file.seek(0, os.SEEK_END)

    def append(self, record: StepRecord) -> None:
        """Write a step; where it has a metric that none before had, all rows are written anew."""
        new = [name for name in _values(record) if name not in self._names]
        if new:
            table = read_curves(self._path.parent)
            rows = [] if table is None else [row.tobytes() for row in table._rows]
            self._names = (*self._names, *new)
            self._file.close()
            absent = np.repeat(_ABSENT, len(new)).tobytes()
            self._begin([row + absent for row in rows])
        self._file.write(_row(record, self._names))

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def _begin(self, rows: Iterable[bytes]) -> None:
        """Write the file, whole, and go on behind."""
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


def _values(record: StepRecord) -> Mapping[str, float]:
    return {**record.metrics, **{SECONDS + phase: seconds for phase, seconds in record.seconds.items()}}


def _row(record: StepRecord, names: Sequence[str]) -> bytes:
    values = _values(record)
    row = np.array([record.step, record.committed_at, *(values.get(name, 0.0) for name in names)], np.float64)
    absent = [place for place, name in enumerate(names, _KEYS) if name not in values]
    row.view(np.int64)[absent] = _ABSENT
    return row.tobytes()


def _header(names: Sequence[str]) -> bytes:
    line = msgspec.json.encode(names)
    return line.ljust(-(-(len(line) + 1) // _HEADER_BYTES) * _HEADER_BYTES - 1) + b"\n"


def _row_bytes(names: Sequence[str]) -> int:
    return 8 * (_KEYS + len(names))
