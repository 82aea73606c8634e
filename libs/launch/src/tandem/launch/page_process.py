"""The page of a run: a process that the coordinator starts and ends, and otherwise leaves alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO, Literal

from tandem.common.errors import ConfigError
from tandem.launch.helper_process import HelperProcess
from tandem.observe.page.address import END, listen, url_of

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
