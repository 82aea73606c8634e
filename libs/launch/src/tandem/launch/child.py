"""The processes that a coordinator has launched, as its children: which have ended, and which must end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tandem.common.messages import ServiceKind
from tandem.common.texts import read_last_lines

KILLED_S = 60.0
"""Longest time that the kernel takes to end a killed process, and a supervisor to report it: on a machine with fifty
processes for a core it was seen to take more than ten seconds."""
_LOG_TAIL_LINES = 3


def select_within(window_s: float, now: float, times: Iterable[float]) -> list[float]:
    """Return the times at most `window_s` before `now`; all are from `time.monotonic`."""
    return [at for at in times if now - at <= window_s]


class ForkedChild:
    """A forked process, with the interface of `subprocess.Popen` where needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Exit code; negative: the signal that ended it."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait until it ends; return the exit code. Raises `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class LaunchedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that the coordinator started."""

    public_key: str
    """Key by which it authenticates when it registers; empty if this process is not the coordinator."""
    kind: ServiceKind
    number: int
    log: Path
    process: ForkedChild

    @property
    def name(self) -> str:
        """Name in the run, such as ``rollout-0``."""
        return f"{self.kind}-{self.number}"

    def describe_death(self) -> str:
        """Describe how it ended, with the last lines of its log."""
        code = self.process.wait(0.0)
        ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        lines = read_last_lines(self.log, _LOG_TAIL_LINES)
        return f"{ending}; last in {self.log}: {' | '.join(lines) or 'nothing'}"


class WatchedProcesses:
    """Launched processes, until they have ended."""

    def __init__(self) -> None:
        self._running: dict[str, LaunchedProcess] = {}
        """Running processes by name."""
        self._launched: dict[str, ServiceKind] = {}
        """Every process ever launched, by name, except draining ones."""
        self._leaving: list[tuple[float, LaunchedProcess]] = []
        """Draining processes, and the times by which they must have ended."""

    def died(self) -> list[LaunchedProcess]:
        """Return the processes that ended since the last call, except draining ones."""
        if self._leaving:
            self._end_leaving(time.monotonic())
        dead: list[LaunchedProcess] = []
        for name, launched in [*self._running.items()]:
            if launched.process.poll() is not None:
                dead.append(self._running.pop(name))
        return dead

    def let_go(self, name: str, grace_s: float) -> None:
        """Give a draining process this much time to end; its end is not a loss."""
        self._launched.pop(name, None)
        launched = self._running.pop(name, None)
        if launched is not None:
            self._leaving.append((time.monotonic() + grace_s, launched))

    def stop(self, grace_s: float) -> None:
        """Wait `grace_s` for the processes to end, then kill them: they leave all other signals to this process."""
        self._wait(grace_s)
        self._end_leaving(math.inf)
        for launched in self._running.values():
            launched.process.kill()
        self._wait(KILLED_S)

    def _end_leaving(self, now: float) -> None:
        """Kill draining processes that have not ended in time."""
        self._leaving = [each for each in self._leaving if each[1].process.poll() is None]
        for until, launched in self._leaving:
            if now > until:
                launched.process.kill()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._running or self._leaving) and time.monotonic() < deadline:
            self.died()
            time.sleep(0.02)
