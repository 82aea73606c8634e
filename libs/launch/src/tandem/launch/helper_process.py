"""Processes that help a run, which can do without them: started again a few times, and then no more.

The page of a run is one, which the coordinator starts and ends, and otherwise leaves alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal

from tandem.common.errors import ConfigError
from tandem.common.process_lifetime import continue_stopped, is_stopped
from tandem.common.texts import read_last_lines
from tandem.launch.child import KILLED_S, select_within
from tandem.observe.page.address import END, listen, url_of

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


_HOST = "127.0.0.1"
_END_S = 2.0
"""Time for it to show its viewers how the run ended, before it is killed."""


def open_page_socket(page: Literal["auto", "off"] | int) -> socket.socket | None:
    """Return the socket of a run's page, as ``logger.page`` says; None if it is off.

    Raises `ConfigError` if that is a port that cannot be bound.
    """
    if page == "off":
        return None
    try:
        return listen(_HOST, None if page == "auto" else page)
    except ConfigError as error:
        if page == "auto":
            return None  # the machine has no loopback interface
        raise ConfigError(f"logger.page: {error}: choose another port, auto, or off") from error


class PageProcess:
    """The process of the page. It imports nothing of the coordinator's."""

    def __init__(self, run: Path, listener: socket.socket) -> None:
        """Start the process; from now on the socket belongs to it and its replacements."""
        self.url = url_of(listener)
        self._run = run
        self._listener = listener
        self._helper = HelperProcess("the page", run / "logs" / "page.log", self._start)

    def _start(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        arguments = ["--socket", str(self._listener.fileno()), "--launched-by", str(os.getpid())]
        return subprocess.Popen(
            [sys.executable, "-m", "tandem.observe.page", str(self._run), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[self._listener.fileno()],
            process_group=0,  # Ctrl-C in a terminal is for the coordinator
        )

    def death(self) -> str:
        """Return how it died, and restart it; empty while it lives, and once it has died too often."""
        death = self._helper.death()
        if self._helper.process is None:
            self._listener.close()
        return death

    def close(self) -> None:
        """End the process."""
        self._listener.close()
        self._helper.end(END, _END_S)
