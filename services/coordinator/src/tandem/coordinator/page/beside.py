"""The page beside a run: a process that the coordinator starts, ends, and otherwise leaves to itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

from tandem.common.errors import ConfigError
from tandem.coordinator.page.address import listen, url_of

END = signal.SIGUSR1
"""Asks the process to end. What asks the whole of a run to end it leaves to the coordinator."""
_HOST = "127.0.0.1"
_END_S = 2.0
"""How long it may take to tell those who look how the run ended, before it is killed."""
_KILLED_S = 10.0
"""How long the kernel may take to end a process that was killed."""
_TAIL_LINES = 2


def page_socket(page: Literal["auto", "off"] | int) -> socket.socket | None:
    """Return what the page of a run listens with, as ``logger.page`` says; None if it is off.

    Raises `ConfigError` if that is a port that it cannot have.
    """
    if page == "off":
        return None
    try:
        return listen(_HOST, None if page == "auto" else page)
    except ConfigError as error:
        if page == "auto":
            return None  # a machine without loopback
        raise ConfigError(f"logger.page: {error}: choose another port, auto, or off") from error


class PageProcess:
    """The process. It has imported nothing of the coordinator's, and is not waited for, not even to begin."""

    def __init__(self, run: Path, listener: socket.socket) -> None:
        """Start it; the socket is its own from now on."""
        self.url = url_of(listener)
        self._log = run / "logs" / "page.log"
        module = "tandem.coordinator.page"
        arguments = ["--socket", str(listener.fileno()), "--launched-by", str(os.getpid())]
        with listener, self._log.open("wb") as log:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-m", module, str(run), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                process_group=0,  # Ctrl-C in a terminal is for the coordinator
            )

    def death(self) -> str:
        """Return how it has died, once; nothing while it lives, and ever after."""
        if self._process is None or (code := self._process.poll()) is None:
            return ""
        self._process = None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        return f"the page {how}; the run goes on without. Last in {self._log}: {' | '.join(lines) or 'nothing'}"

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.send_signal(END)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_KILLED_S)
            self._process = None
