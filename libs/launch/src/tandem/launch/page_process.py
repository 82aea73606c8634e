"""The page of a run: a process that the coordinator starts and ends, and otherwise leaves alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from tandem.common.errors import ConfigError
from tandem.common.texts import read_last_lines
from tandem.launch.child import KILLED_S, select_within
from tandem.observe.page.address import END, listen, url_of

_HOST = "127.0.0.1"
_END_S = 2.0
"""Time for it to show its viewers how the run ended, before it is killed."""
_TAIL_LINES = 2
_MOST_STARTS, _WINDOW_S = 3, 600.0
"""Most starts of the process within the window; then it stays dead."""


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
    """The process of the page. It imports nothing of the coordinator's, and is never waited for, not even to start."""

    def __init__(self, run: Path, listener: socket.socket) -> None:
        """Start the process; from now on the socket belongs to it and its replacements."""
        self.url = url_of(listener)
        self._run = run
        self._log = run / "logs" / "page.log"
        self._listener = listener
        self._started_at: list[float] = []
        self._process: subprocess.Popen[bytes] | None = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_at.append(time.monotonic())
        module = "tandem.observe.page"
        arguments = ["--socket", str(self._listener.fileno()), "--launched-by", str(os.getpid())]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, str(self._run), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._listener.fileno()],
                process_group=0,  # Ctrl-C in a terminal is for the coordinator
            )

    def death(self) -> str:
        """Return how it died, and restart it; empty while it lives, and once it has died too often."""
        if self._process is None or (code := self._process.poll()) is None:
            return ""
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._started_at = select_within(_WINDOW_S, time.monotonic(), self._started_at)
        if len(self._started_at) <= _MOST_STARTS:
            self._process = self._start()
            return f"the page {ending}; it is started again"
        self._process = None
        self._listener.close()
        lines = read_last_lines(self._log, _TAIL_LINES)
        return f"the page {ending}; the run goes on without it. Last in {self._log}: {' | '.join(lines) or 'nothing'}"

    def close(self) -> None:
        """End the process."""
        self._listener.close()
        if self._process is not None:
            self._process.send_signal(END)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(KILLED_S)
            self._process = None
