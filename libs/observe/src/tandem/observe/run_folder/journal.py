"""The journal: a run's history on disk, for resuming it and looking back on it.

It is a SQLite file in the run folder, ``journal.sqlite``. `journal_writer` writes it, and `read_journal` may read it at
any time. Nothing is ever deleted. Steps that a run repeats, after it resumes from an older checkpoint, are marked as
superseded and left in place.

The end of a run is an event in it, where reports, diagnoses and the page read it. A killed run has none.
"""

from __future__ import annotations

import math
import re
import sqlite3
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import msgspec

from tandem.observe.run_folder import journal_file

Outcome: TypeAlias = Literal["finished", "interrupted", "failed"]
"""Ways in which a run can end."""
State: TypeAlias = Literal["running", "finished", "failed", "interrupted", "ended"]
"""State of a run: ``ended`` if the end is unknown, because the coordinator was killed."""
ENDED = re.compile(r"the run (?P<outcome>finished|was interrupted|failed)( \((?P<kind>\w+)\): (?P<why>.*))?", re.DOTALL)
"""Pattern of the event; a failure has the class and text of its error."""
SAID: dict[Outcome, str] = {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}


def outcome_in(line: str) -> Outcome | None:
    """Return how the run ended according to an event; None if the event is about something else."""
    match = ENDED.fullmatch(line)
    return None if match is None else next(outcome for outcome, words in SAID.items() if words == match["outcome"])


def state_of(folder: Path, newest_event: str) -> State:
    """Return the state of the run in a folder, by its newest event since it was last started."""
    return outcome_in(newest_event) or ("running" if journal_file.is_taken(folder) else "ended")


LATE_METRICS = "evaluation"
"""Name, among those of processes, under which events tell of metrics that were added to a finished step."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one step. Step 0 is the validation of the weights that a run starts from."""

    step: int
    version: int
    """Weight version after the step."""
    metrics: dict[str, float]
    """Metrics of the training batch and, if the step was validated, of the held-out problems (``val_``)."""
    seconds: dict[str, float]
    """Wall seconds by phase: ``total`` is the whole step, the others are its parts."""
    checkpoint: str = ""
    """Folder of the checkpoint with this step's weights, which may be written later; empty if there is none."""
    committed_at: float = 0.0
    """Unix time, filled in by the journal."""


class RefitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The refit of these engines to one weight version."""

    version: int
    """Number of training steps behind the version."""
    engines: tuple[str, ...]
    num_bytes: dict[str, int]
    """Bytes on each link, named ``trainer-0>rollout-1``; zero if engines read the trainer's memory."""
    seconds: dict[str, float]
    """Seconds by phase. Wall time of the coordinator: ``transfer``, ``verify`` (beside other work) and ``commit``. Of
    the slowest process: ``copy``, a part of transfer, and ``digest``, a part of verify."""
    predicted_s: float
    """Predicted time of the copy, from the plan."""
    bound_s: float
    """Lower bound of the copy's time for any plan; see `tandem.refit.cost`."""
    digest: int
    """Digest of the whole version, as every engine holds it; zero if not verified. See `tandem.refit.digests.task`."""
    quarantined: dict[str, str]
    """Engines that had to be refitted again, with the reason."""
    verify: str = ""
    """Value of ``refit.verify`` at the time; digests of different elements cannot be compared."""

    @property
    def share_of_bound(self) -> float:
        """The bound divided by the actual time of copying; one is the best."""
        copy_s = self.seconds.get("copy", 0.0)
        return self.bound_s / copy_s if copy_s else 1.0

    @property
    def is_aliased(self) -> bool:
        """Whether engines read all of it in the trainer's memory, without copies."""
        return not any(self.num_bytes.values())


def read_refit(stored: bytes) -> RefitRecord:
    """Read a refit from its row. In journals of earlier versions the phase `verify` is called ``attest``."""
    record = msgspec.json.decode(stored, type=RefitRecord)
    if "attest" in record.seconds:
        record.seconds["verify"] = record.seconds.pop("attest")
    return record


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The journal's record of its run as a whole."""

    run_id: str
    created_at: float
    """Unix time."""
    algorithm: str
    protocol_version: int
    package_version: str


class JournalReader:
    """A reader of a journal, obtained from `Journal` or `read_journal`."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection = connection
        with journal_file.file_errors(folder):
            row = connection.execute(
                "SELECT run_id, created_at, algorithm, protocol_version, package_version FROM run"
            ).fetchone()
        with journal_file.damage(folder):
            if row is None:
                raise LookupError("it names no run")
            self.run = msgspec.convert(dict(zip(RunRecord.__struct_fields__, row, strict=True)), RunRecord)

    @property
    def run_id(self) -> str:
        """Name of the run, created with the journal."""
        return self.run.run_id

    @property
    def config_json(self) -> bytes:
        """Current configuration of the run: the last one written."""
        rows = self.rows("SELECT json FROM configs ORDER BY id DESC LIMIT 1")
        with journal_file.damage(self.folder):
            if not rows or not isinstance(rows[0][0], bytes):
                raise LookupError("it has no configuration")
            return rows[0][0]

    @property
    def num_begun(self) -> int:
        """Number of coordinators that have started or resumed the run."""
        return int(self.rows("SELECT max(id) FROM configs")[0][0])

    def last_step(self) -> int | None:
        """Return the newest finished step; None if there is none."""
        (step,) = self.rows("SELECT max(step) FROM steps WHERE superseded_at IS NULL")[0]
        return None if step is None else int(step)

    def steps(self, *, after: int = -1, since: float = 0.0) -> list[StepRecord]:
        """Return the finished steps in order, without superseded ones.

        Only those `after` a step, and those committed `since` a Unix time.
        """
        which = f"step > {after:d} AND committed_at >= {since:f}"
        return self._steps(f"superseded_at IS NULL AND {which} ORDER BY step")

    def step(self, step: int) -> StepRecord:
        """Return one finished step."""
        (record,) = self._steps(f"superseded_at IS NULL AND step = {step:d}")
        return record

    def superseded_steps(self) -> list[StepRecord]:
        """Return the steps that a resume from an older checkpoint superseded, in the order of their commits."""
        return self._steps("superseded_at IS NOT NULL ORDER BY id")

    def refits(self) -> list[RefitRecord]:
        """Return every refit of a valid version, in order."""
        rows = self.rows("SELECT record FROM refits WHERE superseded_at IS NULL ORDER BY id")
        with journal_file.damage(self.folder):
            return [read_refit(record) for (record,) in rows]

    def events(self) -> list[tuple[float, str, str]]:
        """Return the events of processes, in order: Unix time, process, text."""
        return [(at, member, text) for at, member, text in self.rows("SELECT at, member, text FROM events ORDER BY id")]

    def values_of(self, name: str) -> dict[int, float]:
        """Return the finite values of a metric, by finished step."""
        rows = self.rows(
            "SELECT step, value FROM steps JOIN metrics ON id = step_id WHERE superseded_at IS NULL AND name = ?",
            (name,),
        )
        return {int(step): float(value) for step, value in rows if value is not None}

    def last_event(self) -> str:
        """Return the newest event, as `last_event` does."""
        with journal_file.file_errors(self.folder):
            return last_event(self._connection)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def rows(self, query: str, values: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with journal_file.file_errors(self.folder):
            return self._connection.execute(query, values).fetchall()

    def _steps(self, which: str) -> list[StepRecord]:
        with journal_file.file_errors(self.folder), journal_file.snapshot(self._connection):
            heads = self.rows(f"SELECT id, step, version, checkpoint, committed_at FROM steps WHERE {which}")
            step_ids = f"(SELECT id FROM steps WHERE {which})"
            metrics = self.rows(f"SELECT step_id, name, value FROM metrics WHERE step_id IN {step_ids}")
            seconds = self.rows(f"SELECT step_id, phase, seconds FROM seconds WHERE step_id IN {step_ids}")
        metrics_of: dict[int, dict[str, float]] = {}
        seconds_of: dict[int, dict[str, float]] = {}
        with journal_file.damage(self.folder):
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


def last_event(connection: sqlite3.Connection) -> str:
    """Return the newest event since the run was last started or resumed; empty if there is none."""
    (begun_at,) = connection.execute("SELECT at FROM configs ORDER BY id DESC LIMIT 1").fetchone()
    newest = connection.execute("SELECT at, text FROM events ORDER BY id DESC LIMIT 1").fetchone()
    return newest[1] if newest is not None and newest[0] >= begun_at else ""


def read_journal(folder: Path, *, checks_pages: bool = True) -> JournalReader:
    """Open the journal of `folder` for reading, also while its run is live; `checks_pages` as in `connect_checked`.

    Raises:
        RunFolderError: there is no journal, or it cannot be read.

    """
    journal_file.require_journal(folder)
    connection = journal_file.connect_checked(folder, checks_pages=checks_pages)
    connection.execute("PRAGMA query_only = ON")
    return JournalReader(folder, connection)
