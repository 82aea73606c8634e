"""The timeline: activities of processes by step, in ``timeline.sqlite``, and how they are read.

The file has one row per step, and the newest `MAX_STEPS` steps. It is not synced: it is only for people to look at, and
a crash may cost its last rows. `tandem.coordinator.observers.timeline` writes it, and `tandem.observe.timeline_view` is
the page's picture of it.
"""

from __future__ import annotations

import contextlib
import sqlite3
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
