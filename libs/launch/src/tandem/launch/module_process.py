"""A module in a process of its own, since custom code may do anything: files carry order and answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

from tandem.common.process_lifetime import name_this_process
from tandem.common.texts import read_last_lines
from tandem.launch.child import KILLED_S

_MAIN = """
import runpy, sys
from tandem.common.process_lifetime import fork_guarded
fork_guarded(int(sys.argv[1]), int(sys.argv[2]))
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class ModuleProcess:
    """A process that runs ``python -m MODULE ORDER ANSWER WORDS...``, behind a guardian.

    At the end of the context it is killed with all that it has started, daemons included; and so it is with this
    process.
    """

    def __init__(self, module: str, order: bytes, folder: Path, *words: str) -> None:
        """Start it; its files are in `folder`."""
        self.answer = folder / "answer"
        """File that it writes; a process that ends early may have written none, or a part."""
        self._output = folder / "output.txt"
        order_file = folder / "order"
        order_file.write_bytes(order)
        self._lifeline, far = socket.socketpair()
        # -B: a check leaves no compiled files beside the user's.
        command = [sys.executable, "-B", "-c", _MAIN, str(far.fileno()), str(os.getpid())]
        with far, self._output.open("wb") as output:
            self._guardian = subprocess.Popen(
                [*command, module, str(order_file), str(self.answer), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[far.fileno()],
                env=name_this_process(),
            )

    def wait(self, deadline_s: float) -> None:
        """Wait until it has ended. Raises `subprocess.TimeoutExpired`."""
        self._guardian.wait(deadline_s)

    @property
    def ending(self) -> str:
        """The exit code of a process that has ended, and the last line that it printed."""
        last = (read_last_lines(self._output, 1) or ["nothing"])[-1]
        # What its guardian says of it; of one that ends otherwise than by itself, the guardian's own code.
        code = self._lifeline.recv(16).decode() or self._guardian.returncode
        return f"ended the process (exit code {code}); its last line: {last}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lifeline.close()
        try:
            self._guardian.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
