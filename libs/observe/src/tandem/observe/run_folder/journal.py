"""The journal: what a run did, on disk, so that it can be continued and looked back on.

One SQLite file in the run folder, ``journal.sqlite``. A step is done when `Journal.commit_step` returns, not before:
its metrics and seconds are written in one transaction that is synced to disk. Nothing is ever deleted: what a
run that resumes from an older checkpoint does over again is marked as superseded and left in place.

One process writes, from one thread; a lock in the folder, which the kernel gives back however the process ends, keeps
others out. Anyone may read at any time with `read_journal`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from tandem.common.errors import RunFolderError
from tandem.observe.run_folder.journal_file import (
    SCHEMA_VERSION,
    connect_checked,
    damage,
    file_errors,
    new_run_id,
    refuse_journal,
    require_journal,
    snapshot,
    take_folder,
    write_new_file,
)

_SHORTAGE_S = 8.0
"""How long to wait for a descriptor: connections of strangers end after five seconds (`tandem.common.curve`)."""
_LOOK_S = 0.05


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of one step. Step 0 is the validation of the weights that a run starts from."""

    step: int
    version: int
    """Weight version after the step."""
    metrics: dict[str, float]
    """Of the training batch; those of the held-out problems, where the step was validated, begin with ``val_``."""
    seconds: dict[str, float]
    """Wall seconds by phase: ``total`` is the whole step, the others are its parts."""
    checkpoint: str = ""
    """Folder of the checkpoint that holds this step's weights, which may be written later; empty if there is none."""
    committed_at: float = 0.0
    """Unix time; the journal fills it in."""


class RefitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One weight version that reached these engines whole."""

    version: int
    """The number of training steps behind it."""
    engines: tuple[str, ...]
    num_bytes: dict[str, int]
    """Bytes counted on each link, named ``trainer-0>rollout-1``; none where engines read the trainer's memory."""
    seconds: dict[str, float]
    """By phase. Wall time of the coordinator: ``transfer``, ``attest`` (beside other work) and ``commit``; of the
    slowest process: ``copy``, which is part of transfer, and ``digest``, which is part of attest."""
    predicted_s: float
    """What the plan said that copy takes."""
    bound_s: float
    """What no plan could do it in; see `tandem.refit.cost`."""
    digest: int
    """Of the whole version, as every engine holds it; zero if it was not verified. See `tandem.refit.digests.task`."""
    quarantined: dict[str, str]
    """Engines that had to be refitted once more, and why."""
    verify: str = ""
    """``refit.verify`` at the time: digests of different elements cannot be compared."""

    @property
    def share_of_bound(self) -> float:
        """The bound over what copying took: one is the best there is."""
        copy_s = self.seconds.get("copy", 0.0)
        return self.bound_s / copy_s if copy_s else 1.0

    @property
    def is_aliased(self) -> bool:
        """Whether engines read all of it where the trainer keeps it: not a byte was copied."""
        return not any(self.num_bytes.values())


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal says about its run as a whole."""

    run_id: str
    created_at: float
    """Unix time."""
    algorithm: str
    protocol_version: int
    package_version: str


class JournalReader:
    """Reads a journal; `Journal` and `read_journal` give one out."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection = connection
        with file_errors(folder):
            row = connection.execute(
                "SELECT run_id, created_at, algorithm, protocol_version, package_version FROM run"
            ).fetchone()
        with damage(folder):
            if row is None:
                raise LookupError("it names no run")
            self.run = msgspec.convert(dict(zip(RunRecord.__struct_fields__, row, strict=True)), RunRecord)

    @property
    def run_id(self) -> str:
        """The run's name, made when the journal was."""
        return self.run.run_id

    @property
    def config_json(self) -> bytes:
        """The configuration that the run goes by now: the last one written."""
        rows = self._rows("SELECT json FROM configs ORDER BY id DESC LIMIT 1")
        with damage(self.folder):
            if not rows or not isinstance(rows[0][0], bytes):
                raise LookupError("it has no configuration")
            return rows[0][0]

    @property
    def num_begun(self) -> int:
        """How many coordinators have begun the run or gone on with it."""
        return int(self._rows("SELECT count(*) FROM configs")[0][0])

    def last_step(self) -> int | None:
        """Return the newest step that is done; None if there is none."""
        (step,) = self._rows("SELECT max(step) FROM steps WHERE superseded_at IS NULL")[0]
        return None if step is None else int(step)

    def steps(self, *, after: int = -1, since: float = 0.0) -> list[StepRecord]:
        """Return the steps that are done, in order, without those that were superseded.

        Only those `after` a step, and those committed `since` a Unix time.
        """
        which = f"step > {after:d} AND committed_at >= {since:f}"
        return self._steps(f"superseded_at IS NULL AND {which} ORDER BY step")

    def step(self, step: int) -> StepRecord:
        """Return one step, which is done."""
        (record,) = self._steps(f"superseded_at IS NULL AND step = {step:d}")
        return record

    def superseded_steps(self) -> list[StepRecord]:
        """Return the steps that a resume from an older checkpoint did over again, in the order they were committed."""
        return self._steps("superseded_at IS NOT NULL ORDER BY id")

    def refits(self) -> list[RefitRecord]:
        """Return every refit of a version that still counts, in order."""
        rows = self._rows("SELECT record FROM refits WHERE superseded_at IS NULL ORDER BY id")
        with damage(self.folder):
            return [msgspec.json.decode(record, type=RefitRecord) for (record,) in rows]

    def events(self) -> list[tuple[float, str, str]]:
        """Return what happened to processes, in order: Unix time, member, text."""
        return [
            (at, member, text) for at, member, text in self._rows("SELECT at, member, text FROM events ORDER BY id")
        ]

    def last_event(self) -> str:
        """Return what `last_event` does."""
        with file_errors(self.folder):
            return last_event(self._connection)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        with file_errors(self.folder):
            return self._connection.execute(query).fetchall()

    def _steps(self, which: str) -> list[StepRecord]:
        with file_errors(self.folder), snapshot(self._connection):
            heads = self._rows(f"SELECT id, step, version, checkpoint, committed_at FROM steps WHERE {which}")
            chosen = f"(SELECT id FROM steps WHERE {which})"
            metrics = self._rows(f"SELECT step_id, name, value FROM metrics WHERE step_id IN {chosen}")
            seconds = self._rows(f"SELECT step_id, phase, seconds FROM seconds WHERE step_id IN {chosen}")
        metrics_of: dict[int, dict[str, float]] = {}
        seconds_of: dict[int, dict[str, float]] = {}
        with damage(self.folder):
            for step_id, name, value in metrics:
                # SQLite has no NaN and stores it as NULL.
                metrics_of.setdefault(step_id, {})[name] = math.nan if value is None else float(value)
            for step_id, phase, value in seconds:
                seconds_of.setdefault(step_id, {})[phase] = float(value)
        return [
            StepRecord(
                step=step,
                version=version,
                metrics=metrics_of.get(step_id, {}),
                seconds=seconds_of.get(step_id, {}),
                checkpoint=checkpoint,
                committed_at=committed_at,
            )
            for step_id, step, version, checkpoint, committed_at in heads
        ]


class Journal(JournalReader):
    """The one writer of a run's journal. It must be used from the thread that opened it."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, lock: int) -> None:
        self._lock = lock
        super().__init__(folder, connection)

    @classmethod
    def create(cls, folder: Path, config_json: bytes, algorithm: str, run_id: str | None = None) -> Self:
        """Start a run in `folder`, which is made if it is not there; without a name it gets a new one.

        Raises:
            RunFolderError: the folder already holds a run, is taken by a running coordinator, or cannot be written.

        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"cannot make the run folder {folder}: {error.strerror}") from error
        lock = take_folder(folder)
        try:
            refuse_journal(folder)
            write_new_file(folder, run_id or new_run_id(), config_json, algorithm)
            return cls(folder, connect_checked(folder), lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Continue the run in `folder`.

        Raises:
            RunFolderError: there is no run, a coordinator is running in it, or the journal cannot be read.

        """
        require_journal(folder)
        lock = take_folder(folder)
        try:
            return cls(folder, connect_checked(folder), lock)
        except BaseException:
            os.close(lock)
            raise

    def commit_step(self, record: StepRecord) -> StepRecord:
        """Write a step, whole, to disk; return it with the time at which it became done.

        Raises:
            RunFolderError: the disk is full or the file cannot be written; the step is then not in the journal at all.

        """
        record = msgspec.structs.replace(record, committed_at=time.time())
        with self._transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO steps (step, committed_at, version, checkpoint) VALUES (?, ?, ?, ?)",
                (record.step, record.committed_at, record.version, record.checkpoint),
            )
            step_id = cursor.lastrowid
            connection.executemany(
                "INSERT INTO metrics VALUES (?, ?, ?)", [(step_id, *pair) for pair in record.metrics.items()]
            )
            connection.executemany(
                "INSERT INTO seconds VALUES (?, ?, ?)", [(step_id, *pair) for pair in record.seconds.items()]
            )
        return record

    def record_checkpoint(self, step: int, folder: str) -> None:
        """Write that the checkpoint of a step that is done is whole."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE steps SET checkpoint = ? WHERE step = ? AND superseded_at IS NULL", (folder, step)
            )

    def record_refit(self, record: RefitRecord) -> None:
        """Write that a weight version reached engines."""
        # A digest is an unsigned 64-bit number, which SQLite has not: hence JSON.
        encoded = msgspec.json.encode(record).decode()
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO refits (at, step, record) VALUES (?, ?, ?)", (time.time(), record.version, encoded)
            )

    def record_event(self, member: str, text: str) -> None:
        """Write what happened to a process: joined, lost, failed."""
        with self._transaction() as connection:
            connection.execute("INSERT INTO events (at, member, text) VALUES (?, ?, ?)", (time.time(), member, text))

    def record_config(self, config_json: bytes) -> None:
        """Write the configuration that the run goes on with; the earlier ones stay."""
        with self._transaction() as connection:
            connection.execute("INSERT INTO configs (at, json) VALUES (?, ?)", (time.time(), config_json))

    def forget_after(self, step: int) -> int:
        """Mark what came after `step` as superseded, for a run that goes on from there; return how many steps."""
        now = time.time()
        with self._transaction() as connection:
            for table in ("steps", "refits"):
                connection.execute(
                    f"UPDATE {table} SET superseded_at = ? WHERE step > ? AND superseded_at IS NULL", (now, step)
                )
            (count,) = connection.execute("SELECT count(*) FROM steps WHERE superseded_at = ?", (now,)).fetchone()
            return int(count)

    def close(self) -> None:
        """Close the file and give the folder back."""
        super().close()
        os.close(self._lock)

    def _begin(self) -> None:
        """Begin a transaction; where the process has no descriptor left just now, wait until it has one."""
        deadline = time.monotonic() + _SHORTAGE_S
        while True:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                # The first statement that writes opens the file to roll back by.
                self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            except sqlite3.OperationalError as error:
                self._connection.execute("ROLLBACK")
                if error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN or time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(_LOOK_S)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with file_errors(self.folder):
            self._begin()
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite has already rolled back after some disk errors
                    self._connection.execute("ROLLBACK")
                raise


def last_event(connection: sqlite3.Connection) -> str:
    """Return the newest event since the run was begun or resumed the last time; empty if there is none."""
    (begun_at,) = connection.execute("SELECT at FROM configs ORDER BY id DESC LIMIT 1").fetchone()
    newest = connection.execute("SELECT at, text FROM events ORDER BY id DESC LIMIT 1").fetchone()
    return newest[1] if newest is not None and newest[0] >= begun_at else ""


def read_journal(folder: Path) -> JournalReader:
    """Open the journal of `folder` for reading, also while its run is going on.

    Raises:
        RunFolderError: there is no journal, or it cannot be read.

    """
    require_journal(folder)
    connection = connect_checked(folder)
    connection.execute("PRAGMA query_only = ON")
    return JournalReader(folder, connection)
