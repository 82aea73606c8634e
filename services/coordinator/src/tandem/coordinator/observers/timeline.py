"""The timeline: what each process did when, by step, in ``timeline.sqlite`` within the run folder.

A span is a request, from its sending to its answer. The coordinator's own spans are the phases of the run, with the
same instants as a step's seconds. Spans are kept in memory until their step is committed, and then written in one row
without syncing: people look at the file, and a crash may lose some of it. The newest `MAX_STEPS` steps stay.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from tandem.common import messages
from tandem.common.errors import is_shortage
from tandem.coordinator.observers.observer import ReportingObserver
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import Event
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.timeline import COORDINATOR, MAX_STEPS, TIMELINE_NAME, StepSpans, TimelineSpan, What, connect

_ERRORS = (sqlite3.Error, OSError)
_GIVES_UP = "the timeline is not recorded any further"
_LEAST_S = 1e-3
"""Shorter waits are left out."""
_WHAT: dict[type[msgspec.Struct], tuple[What, str]] = {
    messages.OpenRendezvous: ("starting", "open rendezvous"),
    messages.BuildTrainer: ("starting", "build trainer"),
    messages.BuildEngine: ("starting", "build engine"),
    messages.PlanTransfers: ("starting", "plan transfers"),
    messages.InstallProgram: ("starting", "install program"),
    messages.ConnectTransferGroup: ("starting", "connect transfer group"),
    messages.Generate: ("generating", "generate"),
    messages.RestoreSamples: ("generating", "from before the run was resumed"),
    messages.Train: ("training", "train"),
    messages.StreamGroups: ("training", "stream"),
    messages.Evaluate: ("validating", "evaluate"),
    messages.CopyWeights: ("refitting", "copy weights"),
    messages.Refit: ("refitting", "refit"),
    messages.CommitVersion: ("refitting", "commit version"),
    messages.ReportDigests: ("verifying", "report digests"),
    messages.SaveCheckpoint: ("saving", "save checkpoint"),
    messages.AwaitCheckpoint: ("saving", "await checkpoint"),
    messages.RecordSamples: ("recording", "record samples"),
}
"""The activity that each request is for, and the words for it."""
_PHASES: dict[RunPhase, What] = {
    RunPhase.JOINING: "starting",
    RunPhase.BUILDING: "starting",
    RunPhase.PLANNING: "starting",
    RunPhase.INSTALLING: "starting",
    RunPhase.CONNECTING: "starting",
    RunPhase.COPYING: "refitting",
    RunPhase.REFITTING: "refitting",
    RunPhase.VERIFYING: "verifying",
    RunPhase.GENERATING: "generating",
    RunPhase.TRAINING: "training",
    RunPhase.VALIDATING: "validating",
    RunPhase.SAVING: "saving",
    RunPhase.WRITING: "saving",
    RunPhase.RECORDING: "recording",
}
"""All phases but the end."""


class _Asked(msgspec.Struct, frozen=True):
    """An unanswered request."""

    process: str
    activity: What
    step: int | None
    start: float
    detail: str


class TimelineWriter(ReportingObserver):
    """The only writer of a run's timeline. Times are by the monotonic clock; an error is reported once."""

    def __init__(
        self,
        folder: Path,
        first_step: int,
        tell: Callable[[list[StepSpans]], None] | None = None,
    ) -> None:
        """Forget what is there of coming steps. `tell` gets the rows as they are written."""
        super().__init__()
        self._tell = tell
        self._now = 0.0
        """Time of the event being handled."""
        self._step = first_step
        self._unix = time.time() - time.monotonic()
        self._asked: dict[int, _Asked] = {}
        self._spans: list[TimelineSpan] = []
        self._phase: RunPhase | None = None
        self._phase_since = 0.0
        self._file: sqlite3.Connection | None = None
        with self.going_on(_GIVES_UP, _ERRORS):
            self._file = open_timeline(folder / TIMELINE_NAME, first_step)

    def sent(self, process: str, command: messages.AnyCommand, now: float) -> None:
        """Note a request to a process."""
        activity, detail = _WHAT.get(type(command), (None, ""))
        if activity is None or (isinstance(command, messages.Generate) and not command.groups):
            return
        if isinstance(command, messages.Generate):
            activity = "validating" if command.purpose == "validate" else activity
            detail = f"{len(command.groups)} group{'s' * (len(command.groups) != 1)}"
        elif isinstance(command, messages.Refit | messages.CopyWeights | messages.ReportDigests):
            detail = f"version {command.version}"
        step = getattr(command, "step", getattr(command, "version", None))
        self._asked[command.command_id] = _Asked(process, activity, step, now, detail)

    def answered(self, process: str, reply: messages.Reply | messages.Failed, now: float) -> None:
        """Note that a request was carried out, or failed."""
        request = self._asked.pop(reply.command_id, None)
        if request is None:
            return
        if isinstance(reply, messages.Failed):
            request = msgspec.structs.replace(request, detail=f"failed: {reply.error}"[:200])
        if not isinstance(reply, messages.Trained):
            self._add(request, request.activity, request.start, now)
            return
        # A rank reports its compute time; before that, it was fetching the samples of its shard.
        training = 0.0
        for name, seconds in reply.seconds.items():
            training += seconds if name.endswith("_training") else 0.0
        scoring = sum(reply.seconds.values()) - training
        scored, began = max(request.start, now - training), max(request.start, now - training - scoring)
        if began - request.start > _LEAST_S:
            waits = msgspec.structs.replace(request, detail="for the samples of its shard")
            self._add(waits, "waiting", request.start, began)
        if scored > began:
            self._add(request, "log-probabilities", began, scored)
        if reply.waited_s:
            detail = f"own work {reply.compute_s:.3g} s, waiting for other ranks {reply.waited_s:.3g} s"
            request = msgspec.structs.replace(request, detail=detail)
        self._add(request, "training", scored, now)

    def give_up(self, is_pending: Callable[[int], bool], now: float) -> None:
        """End the spans of requests that are no longer pending."""
        for command_id in [*itertools.filterfalse(is_pending, self._asked)]:
            request = msgspec.structs.replace(self._asked.pop(command_id), detail="given up")
            self._add(request, request.activity, request.start, now)

    def handled(self, event: Event, scheduler: Scheduler) -> None:
        """Note the phase of the run."""
        self._now = event.now
        if (phase := scheduler.tables.watch.phase) is not self._phase:
            self.enter(phase, event.now)

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """End the spans of requests that are no longer pending."""
        self.give_up(scheduler.tables.requests.__contains__, time.monotonic())

    def committed(self, record: StepRecord) -> None:
        """Write a finished step."""
        self.commit(record.step, record.seconds.get("total", 0.0), self._now)

    def enter(self, phase: RunPhase, now: float) -> None:
        """Note the phase of the run."""
        self._end_phase(now)
        self._phase = phase

    def commit(self, step: int, total_s: float, now: float) -> None:
        """Write a step that took `total_s`, and all spans that ended meanwhile."""
        self._end_phase(now)
        end, start = now + self._unix, now + self._unix - total_s
        before, within = list[TimelineSpan](), list[TimelineSpan]()
        for span in self._spans:
            (within if span.end > start else before).append(span)
        rows = [StepSpans(step=step, start=start, end=end, spans=within)]
        if before:  # setup is part of no step
            began = min(span.start for span in before)
            rows.insert(0, StepSpans(step=step - 1, start=began, end=start, spans=before))
        self._spans = []
        self._step = step + 1
        if self._tell is not None:
            self._tell(rows)
        if self._file is not None:
            with self.going_on(_GIVES_UP, _ERRORS):
                write_steps(self._file, rows)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_phase(self, now: float) -> None:
        activity = None if self._phase is None else _PHASES.get(self._phase)
        if activity is not None and self._phase is not None and now > self._phase_since:
            request = _Asked(COORDINATOR, activity, None, self._phase_since, self._phase.value)
            self._add(request, activity, request.start, now)
        self._phase_since = now

    def _add(self, request: _Asked, activity: What, start: float, end: float) -> None:
        span = TimelineSpan(
            process=request.process,
            what=activity,
            step=self._step if request.step is None else request.step,
            start=start + self._unix,
            end=end + self._unix,
            detail=request.detail,
        )
        self._spans.append(span)


def open_timeline(path: Path, first_step: int) -> sqlite3.Connection:
    """Open the file for writing; an unreadable one, as after a crash of the machine, is replaced."""
    try:
        return _prepare(path, first_step)
    except sqlite3.DatabaseError as error:
        if is_shortage(error):
            raise
        path.unlink(missing_ok=True)
        return _prepare(path, first_step)


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


def _prepare(path: Path, first_step: int) -> sqlite3.Connection:
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
