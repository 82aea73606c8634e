"""The timeline: what each process did when, by step, in ``timeline.sqlite`` within the run folder.

A span is an order, from when it was sent to when it was answered; the coordinator's own spans are the phases of the
run, to the same instants that a step's seconds are counted by. They are kept in memory until their step is committed,
and then written in one row, which nothing is synced for: the file is for people to look at, and what a crash takes of
it is gone. The newest steps stay, `MAX_STEPS` of them.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from tandem.common.messages import (
    Attest,
    AwaitCheckpoint,
    BuildEngine,
    BuildTrainer,
    CommitVersion,
    ConnectMesh,
    CopyWeights,
    Evaluate,
    Failed,
    Generate,
    InstallProgram,
    OpenRendezvous,
    Order,
    PlanTransfers,
    RecordSamples,
    Refit,
    Reply,
    RestoreSamples,
    SaveCheckpoint,
    Train,
    Trained,
)
from tandem.coordinator.members.members import Registry
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import Event
from tandem.coordinator.scheduler.phases import Phase
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.timeline_file import (
    COORDINATOR,
    TIMELINE_NAME,
    Span,
    StepSpans,
    What,
    open_timeline,
    write_steps,
)

_LEAST_S = 1e-3
"""Shorter waits are not told."""
_WHAT: dict[type[msgspec.Struct], What] = {
    OpenRendezvous: "starting",
    BuildTrainer: "starting",
    BuildEngine: "starting",
    PlanTransfers: "starting",
    InstallProgram: "starting",
    ConnectMesh: "starting",
    Generate: "generating",
    RestoreSamples: "generating",
    Train: "training",
    Evaluate: "validating",
    CopyWeights: "refitting",
    Refit: "refitting",
    CommitVersion: "refitting",
    Attest: "verifying",
    SaveCheckpoint: "saving",
    AwaitCheckpoint: "saving",
    RecordSamples: "recording",
}
_PHASES: dict[Phase, What] = {
    Phase.JOINING: "starting",
    Phase.BUILDING: "starting",
    Phase.PLANNING: "starting",
    Phase.INSTALLING: "starting",
    Phase.CONNECTING: "starting",
    Phase.COPYING: "refitting",
    Phase.REFITTING: "refitting",
    Phase.ATTESTING: "verifying",
    Phase.GENERATING: "generating",
    Phase.TRAINING: "training",
    Phase.VALIDATING: "validating",
    Phase.SAVING: "saving",
    Phase.WRITING: "saving",
    Phase.RECORDING: "recording",
}
"""All but the end."""


class _Asked(msgspec.Struct, frozen=True):
    """An order that is not answered."""

    process: str
    what: What
    step: int | None
    start: float
    detail: str


class Timeline(Observer):
    """The one writer of a run's timeline. It takes moments of the monotonic clock; what goes wrong is said once."""

    def __init__(
        self,
        folder: Path,
        first_step: int,
        tell: Callable[[list[StepSpans]], None] = lambda _: None,
    ) -> None:
        """Forget what is there of the steps that are to come. `tell` is given what is written, as it is."""
        self._tell = tell
        self._news: list[str] = []
        self._now = 0.0
        """When the event happened that is dealt with."""
        self._step = first_step
        self._unix = time.time() - time.monotonic()
        self._asked: dict[int, _Asked] = {}
        self._spans: list[Span] = []
        self._phase: Phase | None = None
        self._phase_since = 0.0
        self._file: sqlite3.Connection | None = None
        with self._watching():
            self._file = open_timeline(folder / TIMELINE_NAME, first_step)

    def sent(self, process: str, order: Order, now: float) -> None:
        """Note that a process was asked for something."""
        what = _WHAT.get(type(order))
        if what is None or (isinstance(order, Generate) and not order.groups):
            return
        if isinstance(order, Generate | Evaluate) and getattr(order, "purpose", "validate") == "validate":
            what = "validating"
        step = getattr(order, "step", getattr(order, "version", None))
        self._asked[order.command_id] = _Asked(process, what, step, now, _detail(order))

    def answered(self, process: str, reply: Reply | Failed, now: float) -> None:
        """Note that an order was carried out, or could not be."""
        asked = self._asked.pop(reply.command_id, None)
        if asked is None:
            return
        if isinstance(reply, Failed):
            asked = msgspec.structs.replace(asked, detail=f"failed: {reply.error}"[:200])
        if not isinstance(reply, Trained):
            self._add(asked, asked.what, asked.start, now)
            return
        # A rank says how long it has computed; before that, it was fetching the samples of its share.
        training = sum(seconds for name, seconds in reply.seconds.items() if name.endswith("_training"))
        scoring = sum(reply.seconds.values()) - training
        scored, began = max(asked.start, now - training), max(asked.start, now - training - scoring)
        if began - asked.start > _LEAST_S:
            waits = msgspec.structs.replace(asked, detail="for the samples of its share")
            self._add(waits, "waiting", asked.start, began)
        if scored > began:
            self._add(asked, "log-probabilities", began, scored)
        if reply.waited_s:
            told = f"own work {reply.compute_s:.3g} s, waiting for other ranks {reply.waited_s:.3g} s"
            asked = msgspec.structs.replace(asked, detail=told)
        self._add(asked, "training", scored, now)

    def give_up(self, is_pending: Callable[[int], bool], now: float) -> None:
        """Note which orders nobody waits for any more."""
        for command_id in [command_id for command_id in self._asked if not is_pending(command_id)]:
            asked = msgspec.structs.replace(self._asked.pop(command_id), detail="given up")
            self._add(asked, asked.what, asked.start, now)

    def handled(self, event: Event, scheduler: Scheduler) -> None:
        """Note which phase the run is in."""
        self._now = event.now
        self.enter(scheduler.phase, event.now)

    def show(self, scheduler: Scheduler, registry: Registry) -> None:
        """Give up what nobody waits for any more."""
        self.give_up(scheduler.requests.__contains__, time.monotonic())

    def committed(self, record: StepRecord) -> None:
        """Write a step that is done."""
        self.commit(record.step, record.seconds.get("total", 0.0), self._now)

    def take_news(self) -> list[str]:
        """Return what has gone wrong."""
        news, self._news = self._news, []
        return news

    def enter(self, phase: Phase, now: float) -> None:
        """Note which phase the run is in."""
        if phase is not self._phase:
            self._end_phase(now)
            self._phase = phase

    def commit(self, step: int, total_s: float, now: float) -> None:
        """Write a step that has taken so long, and all that ended meanwhile."""
        self._end_phase(now)
        end, start = now + self._unix, now + self._unix - total_s
        before = [span for span in self._spans if span.end <= start]
        rows = [StepSpans(step=step, start=start, end=end, spans=[each for each in self._spans if each.end > start])]
        if before:  # to set everything up is no part of any step
            began = min(span.start for span in before)
            rows.insert(0, StepSpans(step=step - 1, start=began, end=start, spans=before))
        self._spans = []
        self._step = step + 1
        self._tell(rows)
        if self._file is not None:
            with self._watching():
                write_steps(self._file, rows)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_phase(self, now: float) -> None:
        what = None if self._phase is None else _PHASES.get(self._phase)
        if what is not None and self._phase is not None and now > self._phase_since:
            asked = _Asked(COORDINATOR, what, None, self._phase_since, self._phase.value)
            self._add(asked, what, asked.start, now)
        self._phase_since = now

    def _add(self, asked: _Asked, what: What, start: float, end: float) -> None:
        span = Span(
            process=asked.process,
            what=what,
            step=self._step if asked.step is None else asked.step,
            start=start + self._unix,
            end=end + self._unix,
            detail=asked.detail,
        )
        self._spans.append(span)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """What the disk says to the timeline never stops the run."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self.close()
            self._news.append(f"the timeline is not recorded any further: {error}")


def _detail(order: Order) -> str:
    match order:
        case Generate(groups=groups):
            return f"{len(groups)} group{'s' * (len(groups) != 1)}"
        case RestoreSamples():
            return "from before the run was resumed"
        case Refit(version=version) | CopyWeights(version=version) | Attest(version=version):
            return f"version {version}"
        case _:
            return " ".join(_words(type(order).__name__))


def _words(name: str) -> Iterable[str]:
    """Yield the words of the name of a class, in small letters."""
    ends = [i for i, letter in enumerate(name) if letter.isupper()] + [len(name)]
    return (name[a:b].lower() for a, b in itertools.pairwise(ends))
