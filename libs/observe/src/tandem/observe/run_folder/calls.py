"""The journal's table of calls, which only runs have that clients drive."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tandem.observe.run_folder.journal import JournalReader
from tandem.observe.run_folder.journal_file import damage
from tandem.observe.run_folder.journal_writer import Journal

Row = TypeVar("Row", bound=msgspec.Struct)


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a call by which a client drives a run, written after its end."""

    ended_at: float
    """Unix time."""
    kind: str
    """Name of the call, such as ``forward_backward``."""
    model: str
    """Id of the model, or of the sampling session."""
    key: str
    """Name of the API key, not the key."""
    num_sequences: int
    num_tokens: int
    """Tokens of the sequences; of samples with their prompts."""
    seconds: float
    """Time from the request to its end."""
    outcome: str
    """``done``, or the error that the client got."""


_CALLS = """
CREATE TABLE IF NOT EXISTS calls (
    id INTEGER PRIMARY KEY, ended_at REAL NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL, key TEXT NOT NULL,
    num_sequences INTEGER NOT NULL, num_tokens INTEGER NOT NULL, seconds REAL NOT NULL, outcome TEXT NOT NULL
)
"""

_HAS_CALLS = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'calls'"

_SUMMARY = """
SELECT model, key, count(*), sum(num_sequences), sum(num_tokens), sum(seconds), sum(outcome != 'done'), max(ended_at)
FROM calls GROUP BY model, key ORDER BY max(id) DESC LIMIT ?
"""

_NAMES = CallRecord.__struct_fields__


class CallSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one key to one model, or to one sampling session."""

    model: str
    key: str
    num_calls: int
    num_sequences: int
    num_tokens: int
    seconds: float
    """Sum of their times, which may overlap."""
    num_failed: int
    ended_at: float
    """Unix time of the last."""


class NewestCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of clients to a run: the newest, and sums of all."""

    by_model: list[CallSummary]
    """Last used first."""
    newest: list[CallRecord]
    """Last ended first."""


def has_calls(connection: sqlite3.Connection) -> bool:
    """Tell whether clients have driven the run of a journal."""
    return connection.execute(_HAS_CALLS).fetchone() is not None


def journal_has_calls(journal: JournalReader) -> bool:
    """Tell whether clients have driven a run. Raises `RunFolderError`."""
    return bool(journal.rows(_HAS_CALLS))


def newest_calls(connection: sqlite3.Connection, limit: int) -> NewestCalls:
    """Return the newest calls in a journal, and sums by model of all; at most `limit` rows of each."""
    if not has_calls(connection):
        return NewestCalls(by_model=[], newest=[])
    newest = connection.execute(f"SELECT {', '.join(_NAMES)} FROM calls ORDER BY id DESC LIMIT ?", (limit,)).fetchall()
    sums = connection.execute(_SUMMARY, (limit,)).fetchall()
    return NewestCalls(
        by_model=[_struct(CallSummary, row) for row in sums], newest=[_struct(CallRecord, row) for row in newest]
    )


def calls_of(journal: JournalReader) -> list[CallRecord]:
    """Return the calls of clients, in the order of their ends. Raises `RunFolderError`."""
    if not journal_has_calls(journal):
        return []
    rows = journal.rows(f"SELECT {', '.join(_NAMES)} FROM calls ORDER BY id")
    with damage(journal.folder):
        return [_struct(CallRecord, row) for row in rows]


def _struct(kind: type[Row], row: Sequence[Any]) -> Row:
    return msgspec.convert(dict(zip(kind.__struct_fields__, row, strict=True)), kind)


def record_calls(journal: Journal, records: Iterable[CallRecord]) -> None:
    """Record calls of clients, in one transaction. Raises `RunFolderError`."""
    places = ", ".join("?" for _ in _NAMES)
    with journal.transaction() as connection:
        connection.execute(_CALLS)
        connection.executemany(
            f"INSERT INTO calls ({', '.join(_NAMES)}) VALUES ({places})", map(msgspec.structs.astuple, records)
        )
