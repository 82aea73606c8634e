"""The writer of ``curves.f64``, the table of a run's metrics and seconds.

`tandem.observe.run_folder.curves_table` reads it, and says how it is laid out.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tandem.observe.run_folder.curves_table import (
    ABSENT,
    CURVES_NAME,
    KEYS,
    SECONDS,
    CurvesTable,
    read_curves,
    row_bytes,
)
from tandem.observe.run_folder.journal import StepRecord

_HEADER_BYTES = 64
"""The header's size is a multiple of this."""


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
        if new := values.keys() - set(self._names):
            table = read_curves(self._path.parent)
            rows = [] if table is None else [row.tobytes() for row in table._rows]
            self._names += tuple(filter(new.__contains__, values))  # in their order
            self._file.close()
            absent = np.repeat(ABSENT, len(new)).tobytes()
            self._begin([row + absent for row in rows])
        self._file.write(_row(record, values, self._names))

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
    return {**record.metrics, **{SECONDS + phase: seconds for phase, seconds in record.seconds.items()}}


def _row(record: StepRecord, values: Mapping[str, float], names: Sequence[str]) -> bytes:
    row = np.array([record.step, record.committed_at, *map(values.get, names, itertools.repeat(0.0))], np.float64)
    is_absent = ~np.fromiter(map(values.__contains__, names), np.bool_, len(names))
    row[KEYS:].view(np.int64)[is_absent] = ABSENT
    return row.tobytes()


def _header(names: Sequence[str]) -> bytes:
    line = msgspec.json.encode(names)
    return line.ljust(-(-(len(line) + 1) // _HEADER_BYTES) * _HEADER_BYTES - 1) + b"\n"
