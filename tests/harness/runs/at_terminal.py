"""Commands at a terminal of their own, as somebody who types would have them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from tandem.common.descriptors import wait_to_read

TIMEOUT_S = 500.0
_ROWS, _COLUMNS = 50, 160


class Terminal:
    """A command at a terminal of its own; killed at the end, whatever happened."""

    def __init__(self, *words: str | Path, env: Mapping[str, str] | None = None) -> None:
        """`env`: what its environment has beside, or in the place of, this process's."""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        setsid = shutil.which("setsid")
        assert setsid is not None
        # A shell may have had signals ignored for this process, as it does for jobs in the background.
        started = [setsid, "--ctty", "env", "--default-signal", *words]
        self.process = subprocess.Popen(
            started, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **(env or {})}
        )
        os.close(theirs)
        self.seen = ""
        self._rest = ""
        """What was shown at once with what was waited for, after it: the next wait may be for that."""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        os.close(self._ours)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._ours, text.encode())

    def read_until(self, pattern: str) -> str:
        """Return what is shown, after what was last waited for, until it matches, and what comes with that."""
        deadline, shown = time.monotonic() + TIMEOUT_S, self._rest
        while (found := re.search(pattern, shown)) is None:
            assert time.monotonic() < deadline, (pattern, self.seen)
            shown += self._read(1.0)
        self._rest = shown[found.end() :]
        return shown

    def read_until_there(self, path: Path) -> str:
        """Return what is in a file once there is one; what is shown meanwhile is read, so that nothing waits for it."""
        deadline = time.monotonic() + TIMEOUT_S
        while not path.exists():
            assert time.monotonic() < deadline, (path, self.seen)
            self._read(0.02)
        return path.read_text()

    def read_to_the_end(self) -> str:
        """Return what is shown from now on until the command has ended."""
        deadline, shown = time.monotonic() + TIMEOUT_S, ""
        while (read := self._read(0.1)) or self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            shown += read
        return shown

    def interrupt_until(self, pattern: str) -> str:
        """Press Ctrl-C, and again as `interrupt` does; return what is shown until it matches."""
        deadline, shown = time.monotonic() + TIMEOUT_S, ""
        while not re.search(pattern, shown):
            assert time.monotonic() < deadline, (pattern, self.seen)
            self.type("\x03")
            shown += self._read(2.0)
            shown += self._read(0.2)
        return shown

    def interrupt(self) -> str:
        """Press Ctrl-C, and again if nothing happens; return what is shown until the command has ended.

        Python hears of a signal that comes just before it waits for a line only with the next one.
        """
        deadline, shown = time.monotonic() + TIMEOUT_S, ""
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            self.type("\x03")
            shown += self._read(2.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
        return shown + self.read_to_the_end()

    def _read(self, timeout_s: float) -> str:
        read = ""
        if wait_to_read(self._ours, timeout_s):
            with contextlib.suppress(OSError):  # the other end has been closed
                read = os.read(self._ours, 1 << 16).decode(errors="replace")
        self.seen += read
        return read
