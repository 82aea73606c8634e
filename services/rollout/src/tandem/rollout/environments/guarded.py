"""A process that forks others, behind its guardian: all of them end with the process that started it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

_MAIN = "import sys; sys.path[:] = sys.argv[4:]; from {module} import main; main(*map(int, sys.argv[1:4]))"
_GUARDIAN_S = 8.0


class GuardedProcess:
    """A new interpreter that runs ``main(orders_fd, lifeline_fd, owner)`` of a module.

    That function begins with `tandem.common.process_lifetime.fork_guarded`.
    """

    def __init__(self, module: str) -> None:
        self.commands, theirs = socket.socketpair()
        self.lifeline, far = socket.socketpair()
        with theirs, far:
            descriptors = (theirs.fileno(), far.fileno())
            # The child must find what this process finds, such as a module beside the configuration file.
            words = [sys.executable, "-c", _MAIN.format(module=module), *map(str, descriptors), str(os.getpid())]
            self._process = subprocess.Popen([*words, *sys.path], pass_fds=descriptors, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """End the process and everything below it."""
        self.commands.close()
        self.lifeline.close()
        try:
            self._process.wait(_GUARDIAN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
