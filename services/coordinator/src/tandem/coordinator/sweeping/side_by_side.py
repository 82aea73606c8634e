"""The runs of a sweep: ordinary supervised runs, as many side by side as there is room for.

The loop consumes the ends of runs and signals. It waits at most `_LOOK_S` at a time, and is unblocked by nothing else.
The second run starts once the first has begun: until then, that one makes what all of them use, such as the model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.common import signals
from tandem.common.errors import FAILED, INTERRUPTED, OK
from tandem.common.memory import available_bytes
from tandem.common.process_lifetime import list_descendants
from tandem.common.texts import read_last_error
from tandem.config import Config
from tandem.config.threads import count_threads
from tandem.coordinator.sweeping.checking import PlannedRun
from tandem.launch.nodes import launched_processes
from tandem.observe.listing import describe_progress, read_run

_UP = (sys.executable, "-m", "tandem.coordinator.cli", "up")
_LOOK_S = 0.2
_TELL_S = 60.0
"""Interval of the lines about runs that are going on."""
_ROOM = 1.25
"""Free memory that another run needs, as a multiple of what the largest run holds."""

Say = Callable[[str], None]


def room_by_cores(config: Config) -> int:
    """Return how many runs the cores of this machine have room for; one where there is a GPU, which all would use."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return 1
    cores = len(os.sched_getaffinity(0))
    counts = launched_processes(config)
    trainers = counts["trainer"] * count_threads(config, "trainers", cores)
    rollouts = counts.get("rollout", 0) * count_threads(config, "rollouts", cores) if config.generates else 0
    return max(1, cores // max(trainers, rollouts, 1))


class _Started(NamedTuple):
    run: PlannedRun
    process: subprocess.Popen[bytes]
    at: float
    """Unix time."""


class SideBySide:
    """The runs of a sweep that are waiting, going on, and done."""

    def __init__(self, path: str, runs: Sequence[PlannedRun], num_all: int, jobs: int | None, say: Say) -> None:
        """Start at most `jobs` runs at a time; None for as many as cores and memory have room for.

        `num_all` is the number of the sweep's runs with those that are done already.
        """
        self._path = path
        self._say = say
        self._waiting = deque(runs)
        self._num_all = num_all
        self._num_before = num_all - len(runs)
        self._num_started = 0
        self._most = jobs or room_by_cores(runs[0].config)
        self._looks_at_memory = jobs is None
        self._running: list[_Started] = []
        self._codes: list[int] = []
        self._largest = 0
        """Bytes of the largest run."""
        self._has_pioneer = False
        """Whether a run of this call has begun, so that what they share is there."""
        self._is_ending = False

    def run(self, options: Sequence[str] = ()) -> int:
        """Bring all runs to their ends; `options` are those with which new ones begin. Return the exit code."""
        tell_at = time.monotonic() + _TELL_S
        with signals.hear_signals(self._pass_on):
            while self._running or (self._waiting and not self._is_ending):
                while self._waiting and not self._is_ending and self._has_room():
                    self._start(self._waiting.popleft(), options)
                time.sleep(_LOOK_S)
                self._collect()
                if time.monotonic() > tell_at:
                    tell_at = time.monotonic() + _TELL_S
                    for run, _, _ in self._running:
                        self._say(f"{run.combination.name}: {describe_progress(read_run(run.folder).row)}")
        if self._is_ending or INTERRUPTED in self._codes:
            return INTERRUPTED
        return FAILED if any(self._codes) else OK

    def _has_room(self) -> bool:
        """Return whether another run may start now."""
        if not self._running:
            return True
        if len(self._running) >= self._most:
            return False
        rows = [read_run(started.run.folder).row for started in self._running]
        self._has_pioneer |= any(row.state == "running" for row in rows)
        if not self._has_pioneer or not self._looks_at_memory:
            return self._has_pioneer
        if any(row.updated_at < started.at for row, started in zip(rows, self._running, strict=True)):
            return False  # before its first step it does not hold all that it will
        self._largest = max([self._largest, *(measure_memory(started.process.pid) for started in self._running)])
        return available_bytes() >= _ROOM * self._largest

    def _start(self, run: PlannedRun, options: Sequence[str]) -> None:
        self._num_started += 1
        name = run.combination.name
        begin = ["--resume"] if run.progress == "begun" else [*options]
        run.log.parent.mkdir(parents=True, exist_ok=True)
        owner = f"--supervised-by={os.getpid()}"  # the kernel ends it with this process
        words = [*_UP, self._path, *run.settings, "--supervise", owner, *begin]
        # Then `_pass_on` knows of it, and it begins with what it would do about a signal.
        with run.log.open("ab") as output, signals.defer_signals(), signals.block_signals():
            # In a group of its own: a signal from the terminal then reaches it once, through this process.
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
            self._running.append(_Started(run, process, time.time()))
        number = self._num_before + self._num_started
        verb = "goes on" if run.progress == "begun" else "begins"
        self._say(f"{number}/{self._num_all} {name} {verb}; what it prints is in {run.log}")

    def _collect(self) -> None:
        """Take note of the runs that have ended."""
        for started in [*self._running]:
            if (code := started.process.poll()) is None:
                continue
            self._running.remove(started)
            self._codes.append(code)
            run, row = started.run, read_run(started.run.folder).row
            self._has_pioneer |= row.state is not None
            reason = "" if code in (OK, INTERRUPTED) else f"; exit code {code}: {read_last_error(run.log)}"
            self._say(f"{run.combination.name}: {row.state or 'not begun'}, {describe_progress(row)}{reason}")

    def _pass_on(self, number: int) -> None:
        self._is_ending = True
        for started in self._running:
            if started.process.poll() is None:
                started.process.send_signal(number)


def measure_memory(pid: int) -> int:
    """Return the memory of a process and its descendants; what several of them share counts once."""
    total = 0
    for process in (pid, *list_descendants(pid)):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
