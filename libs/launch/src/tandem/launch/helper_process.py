"""A process that helps a run, which can do without it: started again a few times, and then no more."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tandem.common.process_lifetime import continue_stopped, is_stopped
from tandem.common.texts import read_last_lines
from tandem.launch.child import KILLED_S, select_within

_TAIL_LINES = 2
_MOST_STARTS, _WINDOW_S = 3, 600.0
"""Most starts of the process within the window; then it stays dead."""


class HelperProcess:
    """One such process after another. None is ever waited for, not even to start."""

    def __init__(
        self, title: str, log: Path, start: Callable[[BinaryIO], subprocess.Popen[bytes]], advice: str = ""
    ) -> None:
        """Start the process: `start` does, given the end of its log.

        `title` is what the user knows it by, and `advice` says what to do without it.
        """
        self._title, self._log, self._start, self._advice = title, log, start, advice
        self._started_at: list[float] = []
        self.process: subprocess.Popen[bytes] | None = self._start_once()
        """The process that runs, or that `death` has not found dead yet; None if there is no more."""

    def death(self) -> str:
        """Return how it died, and start it again; empty while it runs, and once it has died too often."""
        if self.process is None or (code := self.process.poll()) is None:
            return ""
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._started_at = select_within(_WINDOW_S, time.monotonic(), self._started_at)
        if len(self._started_at) <= _MOST_STARTS:
            self.process = self._start_once()
            return f"{self._title} {ending}; it is started again"
        self.process = None
        lines = " | ".join(read_last_lines(self._log, _TAIL_LINES)) or "nothing"
        return f"{self._title} {ending}; the run goes on without it{self._advice}. Last in {self._log}: {lines}"

    def wake(self) -> None:
        """Have it continue, if it was stopped from outside."""
        if self.process is not None and is_stopped(self.process.pid):
            continue_stopped(self.process.pid)

    def kill(self) -> None:
        """Kill it: `death` finds it, and starts it again."""
        if self.process is not None:
            self.process.kill()

    def end(self, number: signal.Signals, grace_s: float) -> None:
        """End it for good by a signal, and kill it if that takes longer than `grace_s`."""
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(KILLED_S)

    def _start_once(self) -> subprocess.Popen[bytes]:
        self._started_at.append(time.monotonic())
        with self._log.open("ab") as log:
            return self._start(log)
