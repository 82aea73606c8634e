"""The trials of a bisection: child processes with a time limit, and the table of those that are done.

The table has a JSON line for each trial, written once the trial is over. A trial that was cut short is not in it, and
is done again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tandem.common.errors import RunFolderError, TandemError
from tandem.common.texts import read_last_error
from tandem.coordinator.algorithms.left_out import SampleEdit, write_edits
from tandem.coordinator.bisecting.troubles import Outcome, RunTrouble, shows
from tandem.launch.child import KILLED_S
from tandem.observe.diagnosis.evidence import gather
from tandem.observe.run_folder.journal import StepRecord, read_journal

TABLE = "trials.jsonl"
FOLDER = "trials"
"""Folder of the trials' own folders, which a list of runs leaves out."""
_LOOK_S = 0.1
_END_S = 30.0
"""Seconds for a trial to end once it is told to."""
_PROGRAM = (sys.executable, "-m", "tandem.coordinator.bisecting.trial")


class TrialSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A trial: one change, and the steps that it has."""

    kind: Literal["replay", "rerun"]
    change: str
    """The change, in words."""
    settings: dict[str, Any] = {}
    """New values by key."""
    edits: tuple[SampleEdit, ...] = ()
    """Samples that a replay leaves out."""
    from_step: int = 0
    """Step of the checkpoint that it begins with; 0 for the run's model."""
    to_step: int
    """Last step, by the numbers of the run."""

    @property
    def key(self) -> str:
        """Name of the trial, equal for equal trials."""
        content = msgspec.json.encode(msgspec.structs.replace(self, change=""), order="sorted")
        return hashlib.sha256(content).hexdigest()[:16]


class TrialOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order of a trial to its process."""

    run: str
    spec: TrialSpec
    folder: str
    """Folder of the trial."""


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    number: int
    key: str
    kind: Literal["replay", "rerun"]
    change: str
    outcome: Outcome
    reason: str = ""
    """Why it is undecided."""
    values: str = ""
    """Values of the metric by step."""
    num_steps: int
    seconds: float


class TrialHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the table."""

    run_id: str


class BisectionInterrupted(Exception):
    """The bisection was told to end."""


class TrialTable:
    """The trials that are done, in a file that outlives a kill."""

    def __init__(self, folder: Path, run_id: str) -> None:
        """Read or begin the table in a folder. Raises `RunFolderError` if it is of another run, or in use."""
        self._path = folder / TABLE
        self.records: list[TrialRecord] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(run_id)
        except BlockingIOError:
            self.close()
            raise RunFolderError(f"{folder}: another process is doing its trials") from None
        except RunFolderError:
            self.close()
            raise

    def _read(self, run_id: str) -> None:
        """Read or begin the table."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        whole_lines = [line for line in lines if line.endswith(b"\n")]
        if not whole_lines:
            self._path.write_bytes(msgspec.json.encode(TrialHeader(run_id=run_id)) + b"\n")
            return
        try:
            header = msgspec.json.decode(whole_lines[0], type=TrialHeader)
            self.records = [msgspec.json.decode(line, type=TrialRecord) for line in whole_lines[1:]]
        except msgspec.MsgspecError as error:
            raise RunFolderError(f"{self._path} is damaged: {error}; --restart begins anew") from None
        if header.run_id != run_id:
            raise RunFolderError(f"{self._path} is of the run {header.run_id}, which was there before: --restart")
        if len(whole_lines) < len(lines):  # the last line was torn
            self._path.write_bytes(b"".join(whole_lines))

    def close(self) -> None:
        """Let others use the folder."""
        self._lock.close()

    def find(self, key: str) -> TrialRecord | None:
        """Return the trial of that name, if it is done and has decided anything."""
        return next((record for record in self.records if record.key == key and record.outcome != "undecided"), None)

    def append(self, record: TrialRecord) -> None:
        """Add a trial."""
        self.records.append(record)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def carry_out(
    run: Path,
    root: Path,
    number: int,
    spec: TrialSpec,
    trouble: RunTrouble,
    most_s: float,
    signals_heard: Sequence[int],
) -> TrialRecord:
    """Carry out a trial within a time limit. Raises `BisectionInterrupted` once a termination signal was heard."""
    folder = root / FOLDER / str(number)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if spec.edits:
        write_edits(folder / "without.jsonl", spec.edits)
    order = folder / "order.json"
    order.write_bytes(msgspec.json.encode(TrialOrder(run=str(run), spec=spec, folder=str(folder))))
    began = time.monotonic()
    problem = _run_child(order, folder / "output.txt", most_s, signals_heard)
    outcome, reason, records = judge_folder(folder / "run", spec, trouble)
    if outcome == "undecided":
        reason = problem or reason
    shown = [f"{step.metrics[trouble.metric]:.4g}" for step in records if trouble.metric in step.metrics]
    return TrialRecord(
        number=number,
        key=spec.key,
        kind=spec.kind,
        change=spec.change,
        outcome=outcome,
        reason=reason,
        values=" ".join(shown[-6:]),
        num_steps=sum(record.step > 0 for record in records),
        seconds=round(time.monotonic() - began, 1),
    )


def judge_folder(folder: Path, spec: TrialSpec, trouble: RunTrouble) -> tuple[Outcome, str, list[StepRecord]]:
    """Judge the run of a trial; return also why it is undecided, and its steps."""
    try:
        with read_journal(folder) as journal:
            records = journal.steps()
    except TandemError as error:
        return "undecided", str(error), []
    first, last = (spec.from_step + 1, spec.to_step) if spec.kind == "replay" else (0, spec.to_step - spec.from_step)
    if trouble.is_of_one_step:
        first = trouble.first_step - (spec.from_step if spec.kind == "rerun" else 0)
    is_over = bool(records) and records[-1].step >= last
    if trouble.metric:
        outcome = trouble.judge(records, first, last, is_over=is_over)
        missing = trouble.metric not in {name for record in records for name in record.metrics}
        reason = f"it has no {trouble.metric}" if is_over and missing else f"it ended before step {last}"
        return outcome, "" if outcome != "undecided" else reason, records
    try:
        is_there = shows(gather(folder), trouble.finding)
    except TandemError as error:
        return "undecided", str(error), records
    if is_there or is_over:
        return "trouble" if is_there else "well", "", records
    return "undecided", f"it ended before step {last}", records


def _run_child(order: Path, output: Path, most_s: float, signals_heard: Sequence[int]) -> str:
    """Run a trial in a process of its own; return why it did not end well. Raises `BisectionInterrupted`."""
    if signals_heard:
        raise BisectionInterrupted
    deadline = time.monotonic() + most_s
    with output.open("wb") as file:
        # In a group of its own: a signal from the terminal then reaches it once, through this process.
        child = subprocess.Popen(
            [*_PROGRAM, str(order), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        while child.poll() is None and not signals_heard and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        is_late = child.poll() is None and not signals_heard
        _end(child)
    if signals_heard:
        raise BisectionInterrupted
    if is_late:
        return f"it took longer than {most_s:g} s"
    return "" if child.returncode == 0 else read_last_error(output).removeprefix("error: ")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child, and wait until it has."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(KILLED_S)
