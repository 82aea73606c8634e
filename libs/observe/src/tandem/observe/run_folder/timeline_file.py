"""``timeline.sqlite``: what each process of a run did when, a row a step.

Nothing is synced for it: people look at the file, and a crash may cost its last rows. The newest
`MAX_STEPS` steps stay.
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
"""How long the coordinator waits for whoever reads the file, which takes milliseconds."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What a process did from one moment to another, in Unix time."""

    process: str
    what: What
    step: int
    """That it was for."""
    start: float
    end: float
    detail: str = ""


class StepSpans(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and the spans that ended while it was in progress, some of which are for other steps."""

    step: int
    start: float
    end: float
    spans: list[Span]


def read_timeline(folder: Path, num_steps: int, to: int | None) -> list[StepSpans]:
    """Return the newest steps up to one, in order; none where nothing is recorded, or nothing that can be read."""
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
    """Open the file for writing; what is there and cannot be read, as after a crash of the machine, is made anew."""
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
