"""The errors of a journal's file and rows, each as one line that names the file."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from tandem.common.errors import DamagedJournal, RunFolderError

JOURNAL_NAME = "journal.sqlite"
_OF_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextlib.contextmanager
def file_errors(folder: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into one line that names the file."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise_file_error(folder, error)


def raise_file_error(folder: Path, error: sqlite3.Error | OSError) -> NoReturn:
    """Raise an error of SQLite or the file system again, as one line that names the file."""
    if isinstance(error, sqlite3.IntegrityError):
        raise error  # a step committed twice is our bug, not the user's
    is_damaged = isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_DAMAGE
    kind = DamagedJournal if is_damaged else RunFolderError
    raise kind(f"cannot use {folder / JOURNAL_NAME}: {error}") from error


@contextlib.contextmanager
def damage(folder: Path) -> Iterator[None]:
    """Turn errors in a journal's rows, which SQLite cannot notice, into one line that names the file."""
    try:
        yield
    except (msgspec.MsgspecError, TypeError, ValueError, LookupError) as error:
        raise DamagedJournal(f"{folder / JOURNAL_NAME} is damaged: {error}") from error
