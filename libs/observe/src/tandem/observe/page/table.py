"""All values of curves as a CSV file, written part by part while it is sent."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tandem.observe.page.series import Along
from tandem.observe.run_folder.curves import Numbers

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
