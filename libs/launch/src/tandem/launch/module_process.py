"""A module in a process of its own, since custom code may do anything: files carry order and answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tandem.common.texts import read_last_lines
from tandem.launch.child import KILLED_S


class ModuleProcess:
    """A process that runs ``python -m MODULE ORDER ANSWER WORDS...``, with all that it starts.

    It is killed at the end of the context.
    """

    def __init__(self, module: str, order: bytes, folder: Path, *words: str) -> None:
        """Start it; its files are in `folder`."""
        self.answer = folder / "answer"
        """File that it writes; a process that ends early may have written none, or a part."""
        self._output = folder / "output.txt"
        order_file = folder / "order"
        order_file.write_bytes(order)
        # -B: a check leaves no compiled files beside the user's.
        command = [sys.executable, "-B", "-m", module, str(order_file), str(self.answer), *words]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def wait(self, deadline_s: float) -> None:
        """Wait until it has ended. Raises `subprocess.TimeoutExpired`."""
        self._process.wait(deadline_s)

    @property
    def ending(self) -> str:
        """The exit code of a process that has ended, and the last line that it printed."""
        last = (read_last_lines(self._output, 1) or ["nothing"])[-1]
        return f"ended the process (exit code {self._process.returncode}); its last line: {last}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)
