"""Sockets over which a test and the processes that it starts speak in lines.

A process connects by a path, which it can do from another network namespace too, and first says its name and its id.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.launch.child import ForkedChild

TIMEOUT_S = 240.0
"""Longest time until processes have connected, and until one replies or ends."""
_LOOK_S = 0.1


class Wire:
    """The test's end of a socket, to a process that says its name and its id."""

    def __init__(self, theirs: socket.socket) -> None:
        self.name: str = "a process that has just connected"
        self._theirs = theirs
        theirs.settimeout(TIMEOUT_S)
        self._lines = theirs.makefile("rb")
        said = json.loads(self.reply())
        self.name = said["name"]
        self.pid: int = said["pid"]

    def tell(self, line: bytes) -> None:
        self._theirs.sendall(line + b"\n")

    def reply(self) -> bytes:
        """Return the next line."""
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            raise TimeoutError(f"{self.name} said nothing within {TIMEOUT_S:g} s") from error
        assert line.endswith(b"\n"), f"{self.name} has ended"
        return line

    def close(self) -> None:
        self._lines.close()
        self._theirs.close()


class Wires:
    """Where processes connect."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._listening.settimeout(_LOOK_S)

    def accept(
        self, names: Sequence[str], process: subprocess.Popen[bytes] | ForkedChild, stack: contextlib.ExitStack
    ) -> dict[str, Wire]:
        """Return the wires of all that `process` connects, which the stack closes."""
        found: dict[str, Wire] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while missing := [name for name in names if name not in found]:
            code = process.poll()  # before it is looked for the last time
            try:
                theirs, _ = self._listening.accept()
            except TimeoutError:
                assert code is None, f"{missing} ended with code {code} and did not connect"
                assert time.monotonic() < deadline, f"{missing} did not connect within {TIMEOUT_S:g} s"
                continue
            stack.callback(theirs.close)
            wire = Wire(theirs)
            stack.callback(wire.close)
            found[wire.name] = wire
        return {name: found[name] for name in names}

    def close(self) -> None:
        self._listening.close()


@contextlib.contextmanager
def listening() -> Iterator[Wires]:
    """Listen in a folder of a short name: a socket's may have 107 bytes, and the folders of tests have long ones."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Wires(Path(folder) / "wire")) as wires:
        yield wires


def connect(path: str, name: str) -> socket.socket:
    """Connect the process that calls this to the test that has started it."""
    ours = socket.socket(socket.AF_UNIX)
    ours.connect(path)
    ours.sendall(json.dumps({"name": name, "pid": os.getpid()}).encode() + b"\n")
    return ours
