"""The errors of a journal's file and rows, each as one line that names the file."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tandem.common.errors import RunFolderError

JOURNAL_NAME = "journal.sqlite"


@contextlib.contextmanager
def file_errors(folder: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into one line that names the file."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise  # a step committed twice is our bug, not the user's
    except (sqlite3.Error, OSError) as error:
        raise RunFolderError(f"cannot use {folder / JOURNAL_NAME}: {error}") from error


@contextlib.contextmanager
def damage(folder: Path) -> Iterator[None]:
    """Turn errors in a journal's rows, which SQLite cannot notice, into one line that names the file."""
    try:
        yield
    except (msgspec.MsgspecError, TypeError, ValueError, LookupError) as error:
        raise RunFolderError(f"{folder / JOURNAL_NAME} is damaged: {error}") from error
