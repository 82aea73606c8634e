"""The timeline: activities of processes by step, in ``timeline.sqlite``, and the page's picture of it.

The file has one row per step, and the newest `MAX_STEPS` steps. It is not synced: it is only for people to look at, and
a crash may cost its last rows. `tandem.coordinator.observers.timeline` writes it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

TIMELINE_NAME = "timeline.sqlite"
MAX_STEPS = 10_000
COORDINATOR = "coordinator"
What = Literal[
    "starting",
    "generating",
    "training",
    "log-probabilities",
    "refitting",
    "verifying",
    "saving",
    "validating",
    "recording",
    "waiting",
]
_TIMEOUT_S = 1.0
"""Longest time that the coordinator waits for readers of the file, which take milliseconds."""
_LEAST_S = 1e-3
"""Shorter waits are left out: they are the time of messages."""
_PHASES: dict[str, What] = {
    "generation": "generating",
    "get_logprobs": "log-probabilities",
    "value_inference": "log-probabilities",
    "teacher_logprob_inference": "log-probabilities",
    "value_training": "training",
    "policy_training": "training",
    "refit": "refitting",
    "validation": "validating",
    "checkpointing": "saving",
}
"""Names of a step's phases, in order of time."""
_KINDS = ("coordinator", "trainer", "rollout", "refit")


class TimelineSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An activity of a process, with start and end in Unix time."""

    process: str
    what: What
    step: int
    """Step that it was for."""
    start: float
    end: float
    detail: str = ""


class StepSpans(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and the spans that ended during it, some of which are for other steps."""

    step: int
    start: float
    end: float
    spans: list[TimelineSpan]


def read_timeline(folder: Path, num_steps: int, to: int | None) -> list[StepSpans]:
    """Return the newest steps up to `to`, in order; empty if none are recorded or readable."""
    path = folder / TIMELINE_NAME
    if not path.is_file():
        return []
    newest = "SELECT step, start, end, spans FROM steps WHERE step <= ? ORDER BY step DESC LIMIT ?"
    try:
        with contextlib.closing(connect(path, "ro")) as file:
            rows = file.execute(newest, (2**62 if to is None else to, num_steps)).fetchall()
        return [
            StepSpans(step=step, start=start, end=end, spans=msgspec.json.decode(spans, type=list[TimelineSpan]))
            for step, start, end, spans in reversed(rows)
        ]
    except (sqlite3.Error, msgspec.MsgspecError):
        return []


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open the file, without implicit transactions."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_TIMEOUT_S, isolation_level=None)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The time span of a step."""

    step: int
    start: float
    end: float


class LaneSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An activity of a process."""

    what: What
    step: int
    start: float
    end: float
    detail: str


class ProcessLane(msgspec.Struct, frozen=True, kw_only=True):
    """All activities of one process."""

    process: str
    spans: list[LaneSpan]


class FlameBar(msgspec.Struct, frozen=True, kw_only=True):
    """A bar of a flame graph; bars lie within one of the depth above."""

    name: str
    start: float
    end: float
    process: str
    depth: int


class TimelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest steps, their lanes, and possibly a flame graph."""

    steps: list[StepTimes]
    lanes: list[ProcessLane]
    flame: list[FlameBar] = []


Recorded = tuple[float, Mapping[str, float]]
"""When a step was committed, and its seconds by phase."""


def timeline(folder: Path, num_steps: int, to: int | None) -> TimelineView:
    """Return the newest steps up to a given one."""
    rows = read_timeline(folder, num_steps, to)
    if not rows:
        return TimelineView(steps=[], lanes=[])
    first, last = rows[0].start, rows[-1].end
    of_process: dict[str, list[TimelineSpan]] = {}
    for span in _clip(_spans(rows), first, last):
        of_process.setdefault(span.process, []).append(span)
    return TimelineView(
        steps=[StepTimes(step=row.step, start=row.start, end=row.end) for row in rows],
        lanes=[
            ProcessLane(process=process, spans=_lane(of_process[process], first, last))
            for process in sorted(of_process, key=_place)
        ],
    )


def flame(
    folder: Path, step: int, seconds_of: Callable[[int], tuple[float, Mapping[str, float]] | None]
) -> list[FlameBar]:
    """Return a step, its phases, and the processes' activities in them; an activity is cut where each phase ends.

    Without a timeline it is made of what the journal has of the step, its commit time and seconds by phase
    (`seconds_of`).
    """
    rows = [row for row in read_timeline(folder, 1, step) if row.step == step]
    if not rows:
        return _flame_of_seconds(step, seconds_of(step))
    (row,) = rows
    frames = [FlameBar(name=f"step {step}", start=row.start, end=row.end, process=COORDINATOR, depth=0)]
    spans = list(_clip(row.spans, row.start, row.end))
    for phase in sorted((span for span in spans if span.process == COORDINATOR), key=_start):
        frames.append(_frame(phase, 1))
        within = [span for span in spans if span.process != COORDINATOR]
        within = sorted(_clip(within, phase.start, phase.end), key=lambda span: (_place(span.process), span.start))
        frames += [_frame(span, 2) for span in within]
    return frames


def _flame_of_seconds(step: int, recorded: Recorded | None) -> list[FlameBar]:
    if recorded is None:
        return []
    committed_at, seconds = recorded
    at = start = committed_at - seconds.get("total", 0.0)
    frames = [FlameBar(name=f"step {step}", start=start, end=committed_at, process=COORDINATOR, depth=0)]
    for name, activity in _PHASES.items():
        if seconds.get(name, 0.0) > 0:
            frames.append(FlameBar(name=activity, start=at, end=at + seconds[name], process=COORDINATOR, depth=1))
            at += seconds[name]
    return frames


def _lane(spans: Sequence[TimelineSpan], first: float, last: float) -> list[LaneSpan]:
    """Return a process's activities and waits, in order; the coordinator has no waits."""
    ordered = sorted(spans, key=_start)
    if ordered[0].process != COORDINATOR:
        ordered = sorted([*ordered, *_waits(ordered, first, last)], key=_start)
    return [LaneSpan(what=s.what, step=s.step, start=s.start, end=s.end, detail=s.detail) for s in ordered]


def _waits(ordered: Sequence[TimelineSpan], first: float, last: float) -> Iterator[TimelineSpan]:
    at = first
    for span in ordered:
        if span.start - at > _LEAST_S:
            yield _wait(span, at, span.start)
        at = max(at, span.end)
    if last - at > _LEAST_S:
        yield _wait(ordered[-1], at, last)


def _wait(for_what: TimelineSpan, start: float, end: float) -> TimelineSpan:
    return TimelineSpan(process=for_what.process, what="waiting", step=for_what.step, start=start, end=end)


def _spans(rows: Iterable[StepSpans]) -> Iterator[TimelineSpan]:
    for row in rows:
        yield from row.spans


def _clip(spans: Iterable[TimelineSpan], first: float, last: float) -> Iterator[TimelineSpan]:
    """Yield the parts of spans between two moments."""
    for span in spans:
        start, end = max(first, span.start), min(last, span.end)
        if end > start:
            yield msgspec.structs.replace(span, start=start, end=end)


def _frame(span: TimelineSpan, depth: int) -> FlameBar:
    return FlameBar(name=span.what, start=span.start, end=span.end, process=span.process, depth=depth)


def _start(span: TimelineSpan) -> float:
    return span.start


def _place(process: str) -> tuple[int, int, str]:
    """Return the sort key of processes: their kind, then their number."""
    kind, _, number = process.partition("-")
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS), int(number) if number.isdigit() else 0, process
