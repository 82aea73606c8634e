"""The journal's file: its tables, its lock, and how it is opened."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from tandem.common.distribution import version
from tandem.common.errors import DamagedJournal, RunFolderError, nearest
from tandem.common.messages import PROTOCOL_VERSION

LOCK_NAME = "lock"
CONFIG_NAME = "config.yaml"
"""File with the run's resolved configuration, for people."""
RESOLVED_FROM = "# resolved from "
"""Beginning of that file's first line, which names the file that the run was started with."""
SCHEMA_VERSION = 2
"""Version of the tables, raised with every change; a journal of another version is refused."""

_APPLICATION_ID = 0x54414E44
"""``TAND``: distinguishes our files from other SQLite files."""

_BUSY_TIMEOUT_S = 30.0
_NAMED_RUNS = 8
"""Most runs that the refusal of a folder without a run names."""
_PROBES = 10
_PROBE_S = 0.02
"""Attempts to lock, and pause between them: checking whether a folder is taken holds its lock for a moment."""

_SCHEMA = """
CREATE TABLE run (
    run_id TEXT NOT NULL, created_at REAL NOT NULL, algorithm TEXT NOT NULL,
    protocol_version INTEGER NOT NULL, package_version TEXT NOT NULL
);
CREATE TABLE configs (id INTEGER PRIMARY KEY, at REAL NOT NULL, json BLOB NOT NULL);
CREATE TABLE steps (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, committed_at REAL NOT NULL, version INTEGER NOT NULL,
    checkpoint TEXT NOT NULL, superseded_at REAL
);
CREATE UNIQUE INDEX one_current_step ON steps (step) WHERE superseded_at IS NULL;
CREATE TABLE metrics (
    step_id INTEGER NOT NULL REFERENCES steps, name TEXT NOT NULL, value REAL,
    PRIMARY KEY (step_id, name)
) WITHOUT ROWID;
CREATE TABLE seconds (
    step_id INTEGER NOT NULL REFERENCES steps, phase TEXT NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (step_id, phase)
) WITHOUT ROWID;
CREATE TABLE refits (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, step INTEGER NOT NULL, record TEXT NOT NULL, superseded_at REAL
);
CREATE TABLE events (id INTEGER PRIMARY KEY, at REAL NOT NULL, member TEXT NOT NULL, text TEXT NOT NULL);
"""
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


def refuse_journal(folder: Path) -> None:
    """Refuse a folder that already has a run."""
    if (folder / JOURNAL_NAME).exists():
        raise RunFolderError(
            f"{folder} already holds a run: continue it with --resume, set it aside with --restart, or choose another "
            "logger.log_dir"
        )


def require_journal(folder: Path) -> None:
    """Refuse a folder without a run, with the runs in it or beside it."""
    if not (folder / JOURNAL_NAME).is_file():
        runs = [str(run) for run in list_runs_in(folder) or list_runs_in(folder.parent)]
        more = f", and {len(runs) - _NAMED_RUNS} more" if len(runs) > _NAMED_RUNS else ""
        choices = f"; there are {', '.join(runs[:_NAMED_RUNS])}{more}" if runs else ""
        if folder.is_dir():
            raise RunFolderError(f"{folder} holds no run: there is no {JOURNAL_NAME} in it{choices}")
        raise RunFolderError(f"{folder} holds no run: there is no such folder{choices}{nearest(str(folder), runs)}")


def list_runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs directly below a folder."""
    return sorted(path.parent for path in folder.glob(f"*/{JOURNAL_NAME}"))


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep coordinators out of a run folder meanwhile. Raises `RunFolderError` if one runs in it."""
    lock = take_folder(folder)
    try:
        yield
    finally:
        os.close(lock)


def take_folder(folder: Path) -> int:
    """Lock the folder for this process; return the descriptor that holds the lock."""
    path = folder / LOCK_NAME
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFolderError(f"cannot write to the run folder {folder}: {error.strerror}") from error
    try:
        _lock(lock)
    except OSError as error:
        holder = os.pread(lock, 256, 0).decode(errors="replace").strip()
        os.close(lock)
        by = f" by {holder}" if holder else ""
        raise RunFolderError(
            f"{folder} is in use{by}: stop that coordinator or choose another logger.log_dir"
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        os.close(lock)
        raise RunFolderError(f"cannot write to the run folder {folder}: {error.strerror}") from error
    return lock


def is_taken(folder: Path) -> bool:
    """Return whether a coordinator runs in the folder, without preventing another from starting there."""
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _lock(lock: int) -> None:
    """Take a lock. Raises `OSError` if another coordinator has it, but not if a process is just checking the lock."""
    for _ in range(_PROBES - 1):
        with contextlib.suppress(OSError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_PROBE_S)
    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open the file, without implicit transactions."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    # Use a rollback journal, not a write-ahead log: run folders are on network file systems, where the log's shared
    # memory does not work. FULL syncs before a commit returns.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def connect_checked(folder: Path, *, checks_pages: bool = True) -> sqlite3.Connection:
    """Open an existing journal, and check that it is one of ours, of this version, and undamaged.

    Without `checks_pages`, damaged pages are only noticed when they are read: checking all pages takes a second for
    100,000 steps.
    """
    path = folder / JOURNAL_NAME
    with file_errors(folder):
        # Readers also open it for writing if they may: a crash in mid-commit leaves a step to be rolled back.
        connection = _connect(path, "rw")
        try:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (health,) = connection.execute("PRAGMA quick_check(1)").fetchone() if checks_pages else ("ok",)
        except sqlite3.Error:
            connection.close()
            raise
    problem, kind = "", RunFolderError
    if not path.stat().st_size:
        problem, kind = f"{path} is damaged: it is empty", DamagedJournal
    elif application_id != _APPLICATION_ID:
        problem = f"{path} is no journal of a Tandem run"
    elif version != SCHEMA_VERSION:
        problem = (
            f"{path} has journal version {version}, this release reads version {SCHEMA_VERSION}: "
            "use the release that began the run"
        )
    elif health != "ok":
        problem, kind = f"{path} is damaged: {' '.join(health.split())}", DamagedJournal
    if problem:
        connection.close()
        raise kind(problem)
    return connection


def new_run_id() -> str:
    """Return a unique run id that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def write_new_file(folder: Path, run_id: str, config_json: bytes, algorithm: str) -> None:
    """Create the journal of a new run under a temporary name, so that a crash does not leave an incomplete one."""
    unfinished = folder / f"{JOURNAL_NAME}.unfinished"
    with file_errors(folder):
        unfinished.unlink(missing_ok=True)
        with contextlib.closing(_connect(unfinished, "rwc")) as connection:
            _write_schema(connection, run_id, config_json, algorithm)
        unfinished.rename(folder / JOURNAL_NAME)


def _write_schema(connection: sqlite3.Connection, run_id: str, config_json: bytes, algorithm: str) -> None:
    now = time.time()
    connection.execute("BEGIN IMMEDIATE")
    for statement in _statements(_SCHEMA):
        connection.execute(statement)
    connection.execute(
        "INSERT INTO run VALUES (?, ?, ?, ?, ?)",
        (run_id, now, algorithm, PROTOCOL_VERSION, version()),
    )
    connection.execute("INSERT INTO configs (at, json) VALUES (?, ?)", (now, config_json))
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _statements(script: str) -> Iterable[str]:
    """Split a script into statements; `executescript` would commit each of them on its own."""
    return (statement for statement in script.split(";") if statement.strip())


@contextlib.contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Let several reads see one state, whatever is written at the same time."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")
