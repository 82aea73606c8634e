"""One run, as the page reads it: the journal, ``live.json``, and whether a coordinator holds the lock.

Nothing stays open between requests, and every read is short: the journal has a rollback journal, so the coordinator's
commits wait for readers.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tandem.config.schema.declarations import ALGORITHMS
from tandem.observe.run_folder.calls import NewestCalls, has_calls, newest_calls
from tandem.observe.run_folder.journal import RefitRecord, State, last_event, read_refit, state_of
from tandem.observe.run_folder.journal_file import connect_checked, file_errors, require_journal
from tandem.observe.run_folder.live import RunStatus, read_live

_CONFIG = "SELECT json FROM configs ORDER BY id DESC LIMIT 1"


class PageRunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the list of runs."""

    index: int
    name: str
    path: str
    run_id: str
    algorithm: str
    stage: str
    """Runs of one stage share an axis: ``rollouts`` of all algorithms that generate, otherwise the algorithm."""
    model: str
    created_at: float
    state: State
    """``ended`` if the end is unknown, because the coordinator was killed."""
    last_step: int | None
    num_steps: int | None
    updated_at: float
    has_calls: bool
    """Whether clients have driven the run."""


class PageRefit(msgspec.Struct, frozen=True, kw_only=True):
    """A refit, as the page shows it."""

    version: int
    engines: tuple[str, ...]
    num_bytes: dict[str, int]
    seconds: dict[str, float]
    predicted_s: float
    bound_s: float
    share_of_bound: float
    digest: str
    """Digest in hexadecimal, which JavaScript does not round; empty if it was not verified."""
    verify: str
    quarantined: dict[str, str]
    aliased: bool
    """Whether engines read all of it in the trainer's memory, without copies."""


class PastEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the event log."""

    id: int
    at: float
    source: str
    text: str


class RecordMark(msgspec.Struct, frozen=True, kw_only=True):
    """The extent of a run's record, which tells whether there is anything new."""

    last_step: int | None
    last_event: int
    live_at: float
    state: State


class RunReader:
    """Reader of one run folder."""

    def __init__(self, folder: Path) -> None:
        """Check the folder. Raises `RunFolderError` if it has no readable journal."""
        self.folder = folder.absolute()
        with self.journal():
            pass

    @contextlib.contextmanager
    def journal(self) -> Iterator[sqlite3.Connection]:
        """Open the journal. Raises `RunFolderError`, also for errors inside the block."""
        require_journal(self.folder)
        with contextlib.closing(connect_checked(self.folder, checks_pages=False)) as connection:
            connection.execute("PRAGMA query_only = ON")
            with file_errors(self.folder):
                yield connection

    def summary(self, index: int) -> PageRunSummary:
        """Return the run's properties and progress."""
        with self.journal() as journal:
            run_id, created_at, algorithm = journal.execute("SELECT run_id, created_at, algorithm FROM run").fetchone()
            (config_json,) = journal.execute(_CONFIG).fetchone()
            (last_step,) = journal.execute("SELECT max(step) FROM steps WHERE superseded_at IS NULL").fetchone()
            newest = journal.execute(
                "SELECT max((SELECT committed_at FROM steps ORDER BY id DESC LIMIT 1), "
                "coalesce((SELECT at FROM events ORDER BY id DESC LIMIT 1), 0))"
            ).fetchone()[0]
            state, is_driven = self._state(journal), has_calls(journal)
        config = msgspec.json.decode(config_json)
        live = read_live(self.folder)
        num_steps = config.get(algorithm, {}).get("max_num_steps") if live is None else live.num_steps
        return PageRunSummary(
            index=index,
            name=self.folder.name,
            path=str(self.folder),
            run_id=run_id,
            algorithm=algorithm,
            stage="rollouts" if rolls_out(algorithm) else algorithm,
            model=config.get("policy", {}).get("model_name", ""),
            created_at=created_at,
            state=state,
            last_step=last_step,
            num_steps=num_steps,
            updated_at=max(created_at, newest or 0.0, 0.0 if live is None else live.at),
            has_calls=is_driven,
        )

    def _state(self, journal: sqlite3.Connection) -> State:
        """Return the state of the run, ignoring ends before its last start."""
        return state_of(self.folder, last_event(journal))

    def live(self) -> RunStatus | None:
        """Return the coordinator's last status; None once the run has ended."""
        live = read_live(self.folder)
        if live is None:
            return None
        with self.journal() as journal:
            return live if self._state(journal) == "running" else None

    def run_id(self) -> str:
        """Return the run's id."""
        with self.journal() as journal:
            return str(journal.execute("SELECT run_id FROM run").fetchone()[0])

    def configuration(self) -> dict[str, Any]:
        """Return the run's configuration."""
        with self.journal() as journal:
            (config_json,) = journal.execute(_CONFIG).fetchone()
        config: dict[str, Any] = msgspec.json.decode(config_json)
        return config

    def models(self) -> list[str]:
        """Return places of the model's tokenizer: its folder or name, and the newest checkpoint."""
        newest = (
            "SELECT checkpoint FROM steps WHERE checkpoint != '' AND superseded_at IS NULL ORDER BY id DESC LIMIT 1"
        )
        with self.journal() as journal:
            (config_json,) = journal.execute(_CONFIG).fetchone()
            checkpoints = journal.execute(newest).fetchall()
        policy = msgspec.json.decode(config_json).get("policy", {})
        tokenizer = policy.get("tokenizer") or {}
        named = [tokenizer.get("name"), policy.get("model_name")]
        # Names are relative to the folder where the run was started, not the page; checkpoints are mostly in the run's
        # folder.
        folders = [self.folder / "checkpoints" / Path(folder).name for (folder,) in checkpoints]
        places = [*named, *(f"{folder}/policy" for (folder,) in checkpoints), *(f / "policy" for f in folders)]
        return [str(name) for name in places if name]

    def step_seconds(self, step: int) -> tuple[float, dict[str, float]] | None:
        """Return a step's commit time, and its seconds by phase; None if it is not done."""
        query = "SELECT id, committed_at FROM steps WHERE step = ? AND superseded_at IS NULL"
        with self.journal() as journal:
            row = journal.execute(query, (step,)).fetchone()
            if row is None:
                return None
            seconds = journal.execute("SELECT phase, seconds FROM seconds WHERE step_id = ?", (row[0],)).fetchall()
        return row[1], dict(seconds)

    def refits(self, limit: int) -> list[PageRefit]:
        """Return the newest refits of valid versions, in order."""
        query = "SELECT record FROM refits WHERE superseded_at IS NULL ORDER BY id DESC LIMIT ?"
        with self.journal() as journal:
            rows = journal.execute(query, (limit,)).fetchall()
        return [_refit(read_refit(record)) for (record,) in reversed(rows)]

    def calls(self, limit: int) -> NewestCalls:
        """Return the newest calls of clients, and sums of all of them."""
        with self.journal() as journal:
            return newest_calls(journal, limit)

    def events(self, after: int, limit: int) -> list[PastEvent]:
        """Return the newest events after a given one, in order."""
        query = "SELECT id, at, member, text FROM events WHERE id > ? ORDER BY id DESC LIMIT ?"
        with self.journal() as journal:
            rows = journal.execute(query, (after, limit)).fetchall()
        return [PastEvent(id=i, at=at, source=member, text=text) for i, at, member, text in reversed(rows)]

    def mark(self) -> RecordMark:
        """Return the extent of the record."""
        with self.journal() as journal:
            (last_step,) = journal.execute("SELECT max(step) FROM steps WHERE superseded_at IS NULL").fetchone()
            (last_event,) = journal.execute("SELECT max(id) FROM events").fetchone()
            state = self._state(journal)
        live = read_live(self.folder)
        live_at = 0.0 if live is None else live.at
        return RecordMark(last_step=last_step, last_event=last_event or 0, live_at=live_at, state=state)


def rolls_out(algorithm: str) -> bool:
    """Return whether an algorithm generates samples; of one that this release lacks, that is unknown, and taken so."""
    declaration = ALGORITHMS.get(algorithm)
    return declaration is None or declaration.rolls_out


def _refit(record: RefitRecord) -> PageRefit:
    return PageRefit(
        version=record.version,
        engines=record.engines,
        num_bytes=record.num_bytes,
        seconds=record.seconds,
        predicted_s=record.predicted_s,
        bound_s=record.bound_s,
        share_of_bound=record.share_of_bound,
        digest=f"{record.digest:016x}" if record.digest else "",
        verify=record.verify,
        quarantined=record.quarantined,
        aliased=record.is_aliased,
    )
