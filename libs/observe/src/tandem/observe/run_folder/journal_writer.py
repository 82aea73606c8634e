"""The writer of the journal: a step is done only when `Journal.commit_step` returns.

Its metrics and seconds are written in one transaction, which is synced to disk. One process writes, from one thread. A
lock in the folder, which the kernel releases however the process ends, excludes others.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import msgspec

from tandem.common.errors import RunFolderError
from tandem.observe.run_folder import journal_file
from tandem.observe.run_folder.journal import LATE_METRICS, JournalReader, RefitRecord, StepRecord

_SHORTAGE_S = 8.0
"""Longest wait for a descriptor if other threads have taken the reserve's, too: connections of strangers end after five
seconds (`tandem.common.curve`)."""
_LOOK_S = 0.05
_IN_RESERVE = 6
"""Descriptors of a reserve: a file, the one beside it, its folder, and a few for those that other threads snatch."""


class DescriptorReserve:
    """Descriptors held for files that must be opened even when the process has no other descriptor left.

    Use it from one thread. Descriptors that other threads snatch while they are lent are taken back later, after any
    further use.
    """

    def __init__(self, num: int = _IN_RESERVE) -> None:
        """Open the descriptors, as many as there are."""
        self._num = num
        self._held: list[int] = []
        self._fill()

    @property
    def num_held(self) -> int:
        """Number of descriptors in the reserve now."""
        return len(self._held)

    @contextlib.contextmanager
    def lend_descriptors(self) -> Iterator[None]:
        """Give the descriptors up for what the block opens, and take them back afterwards."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Give the descriptors up."""
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # none is free now
            while len(self._held) < self._num:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


class Journal(JournalReader):
    """The only writer of a run's journal. It must be used from the thread that opened it."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, lock: int) -> None:
        self._lock = lock
        self.reserve = DescriptorReserve()
        """Descriptors for the run's record: this journal, and what else its thread must write."""
        try:
            super().__init__(folder, connection)
        except BaseException:
            self.reserve.close()
            raise

    @classmethod
    def create(cls, folder: Path, config_json: bytes, algorithm: str, run_id: str | None = None) -> Self:
        """Start a run in `folder`, which is created if necessary; without `run_id` it gets a new one.

        Raises:
            RunFolderError: the folder already holds a run, is in use by a coordinator, or cannot be written.

        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"cannot make the run folder {folder}: {error.strerror}") from error
        lock = journal_file.take_folder(folder)
        try:
            journal_file.refuse_journal(folder)
            journal_file.write_new_file(folder, run_id or journal_file.new_run_id(), config_json, algorithm)
            return cls(folder, journal_file.connect_checked(folder), lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Continue the run in `folder`.

        Raises:
            RunFolderError: there is no run, a coordinator is running in it, or the journal cannot be read.

        """
        journal_file.require_journal(folder)
        lock = journal_file.take_folder(folder)
        try:
            return cls(folder, journal_file.connect_checked(folder), lock)
        except BaseException:
            os.close(lock)
            raise

    def commit_step(self, record: StepRecord, committed_at: float | None = None) -> StepRecord:
        """Write a complete step to disk; return it with its commit time, which is now unless it is given.

        Raises:
            RunFolderError: the disk is full or the file cannot be written; the journal then does not have the step.

        """
        at = time.time() if committed_at is None else committed_at
        record = msgspec.structs.replace(record, committed_at=at)
        with self.transaction() as connection:
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
        """Record that the checkpoint of a finished step is complete."""
        with self.transaction() as connection:
            connection.execute(
                "UPDATE steps SET checkpoint = ? WHERE step = ? AND superseded_at IS NULL", (folder, step)
            )

    def record_late(self, step: int, metrics: Mapping[str, float], text: str) -> None:
        """Add metrics to a finished step, measured after it, with a line that says so; those that it has stay."""
        with self.transaction() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO metrics SELECT id, ?, ? FROM steps WHERE step = ? AND superseded_at IS NULL",
                [(*pair, step) for pair in metrics.items()],
            )
            connection.execute(
                "INSERT INTO events (at, member, text) VALUES (?, ?, ?)", (time.time(), LATE_METRICS, text)
            )

    def record_refit(self, record: RefitRecord) -> None:
        """Record that a weight version reached engines."""
        # A digest is an unsigned 64-bit number, which SQLite lacks: hence JSON.
        encoded = msgspec.json.encode(record).decode()
        with self.transaction() as connection:
            connection.execute(
                "INSERT INTO refits (at, step, record) VALUES (?, ?, ?)", (time.time(), record.version, encoded)
            )

    def record_event(self, member: str, text: str) -> None:
        """Record a line about the run, and the process that it comes from."""
        with self.transaction() as connection:
            connection.execute("INSERT INTO events (at, member, text) VALUES (?, ?, ?)", (time.time(), member, text))

    def record_config(self, config_json: bytes) -> None:
        """Record the configuration with which the run continues; earlier ones stay."""
        with self.transaction() as connection:
            connection.execute("INSERT INTO configs (at, json) VALUES (?, ?)", (time.time(), config_json))

    def skip_coordinators(self, num: int) -> None:
        """Count `num` further coordinators as having begun, of which no record is left."""
        with self.transaction() as connection:
            connection.execute("UPDATE configs SET id = id + ?", (num,))

    def forget_after(self, step: int) -> int:
        """Mark everything after `step` as superseded, for a run that resumes there; return the number of steps."""
        now = time.time()
        with self.transaction() as connection:
            for table in ("steps", "refits"):
                connection.execute(
                    f"UPDATE {table} SET superseded_at = ? WHERE step > ? AND superseded_at IS NULL", (now, step)
                )
            (count,) = connection.execute("SELECT count(*) FROM steps WHERE superseded_at = ?", (now,)).fetchone()
            return int(count)

    def close(self) -> None:
        """Close the file and release the folder."""
        super().close()
        self.reserve.close()
        os.close(self._lock)

    def _begin(self) -> None:
        """Begin a transaction; if even the reserve has no descriptor for it, wait for one."""
        deadline = time.monotonic() + _SHORTAGE_S
        while True:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                # The first statement that writes opens the rollback file.
                self._connection.execute(f"PRAGMA user_version = {journal_file.SCHEMA_VERSION}")
            except sqlite3.OperationalError as error:
                self._roll_back()
                if error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN or time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(_LOOK_S)

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # SQLite has already rolled back after some disk errors
            self._connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write in one transaction, synced to disk."""
        try:
            with self.reserve.lend_descriptors():
                self._begin()
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    self._roll_back()
                    raise
        except (sqlite3.Error, OSError) as error:
            journal_file.raise_file_error(self.folder, error)
