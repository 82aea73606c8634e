"""The writer of a run's timeline: it opens the file, and adds the steps."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tandem.observe.timeline import MAX_STEPS, StepSpans, connect


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


def _prepared(path: Path, first_step: int) -> sqlite3.Connection:
    file = connect(path, "rwc")
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
