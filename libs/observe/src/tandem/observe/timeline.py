"""The timeline: activities of processes by step, in ``timeline.sqlite``.

The file has one row per step, and the newest `MAX_STEPS` steps. It is not synced: it is only for people to look at, and
a crash may cost its last rows. `tandem.observe.timeline_view` is the page's picture of it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

TIMELINE_NAME = "timeline.sqlite"
MAX_STEPS = 10_000
COORDINATOR = "coordinator"
What = Literal[
    "starting",
    "generating",
    "training",
    "log-probabilities",
    "refitting",
    "verifying",
    "saving",
    "validating",
    "recording",
    "waiting",
]
_TIMEOUT_S = 1.0
"""Longest time that the coordinator waits for readers of the file, which take milliseconds."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An activity of a process, with start and end in Unix time."""

    process: str
    what: What
    step: int
    """Step that it was for."""
    start: float
    end: float
    detail: str = ""


class StepSpans(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and the spans that ended during it, some of which are for other steps."""

    step: int
    start: float
    end: float
    spans: list[Span]


def read_timeline(folder: Path, num_steps: int, to: int | None) -> list[StepSpans]:
    """Return the newest steps up to `to`, in order; empty if none are recorded or readable."""
    path = folder / TIMELINE_NAME
    if not path.is_file():
        return []
    newest = "SELECT step, start, end, spans FROM steps WHERE step <= ? ORDER BY step DESC LIMIT ?"
    try:
        with contextlib.closing(_connect(path, "ro")) as file:
            rows = file.execute(newest, (2**62 if to is None else to, num_steps)).fetchall()
        return [
            StepSpans(step=step, start=start, end=end, spans=msgspec.json.decode(spans, type=list[Span]))
            for step, start, end, spans in reversed(rows)
        ]
    except (sqlite3.Error, msgspec.MsgspecError):
        return []


def open_timeline(path: Path, first_step: int) -> sqlite3.Connection:
    """Open the file for writing; an unreadable one, as after a crash of the machine, is replaced."""
    try:
        return _prepared(path, first_step)
    except sqlite3.DatabaseError:
        path.unlink(missing_ok=True)
        return _prepared(path, first_step)


def write_steps(file: sqlite3.Connection, rows: Iterable[StepSpans]) -> None:
    """Write steps in one transaction, and drop the oldest beyond `MAX_STEPS`."""
    file.execute("BEGIN IMMEDIATE")
    try:
        for row in rows:
            file.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?) ON CONFLICT (step) DO NOTHING",
                (row.step, row.start, row.end, msgspec.json.encode(row.spans)),
            )
            file.execute("DELETE FROM steps WHERE step <= ?", (row.step - MAX_STEPS,))
        file.execute("COMMIT")
    except BaseException:
        if file.in_transaction:
            file.execute("ROLLBACK")
        raise


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_TIMEOUT_S, isolation_level=None)


def _prepared(path: Path, first_step: int) -> sqlite3.Connection:
    file = _connect(path, "rwc")
    try:
        file.execute("PRAGMA synchronous = OFF")
        file.execute(
            "CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, start REAL NOT NULL, end REAL NOT NULL, "
            "spans BLOB NOT NULL)"
        )
        file.execute("DELETE FROM steps WHERE step >= ?", (first_step,))
    except BaseException:
        file.close()
        raise
    return file
