"""The console commands, forked from a process that has imported what they need.

They are the same processes but for the start of Python, its imports, and what libraries make once in a process, which
would be most of the processor time of all tests. The process that forks is a new interpreter, so that nothing of
pytest's is in them. What checks the commands themselves runs them as a user does.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

from tandem.launch.child import ForkedChild
from tandem.launch.fork_server import ServiceForkServer, serve
from tandem.launch.launch import preload
from tests.harness import leaks
from tests.harness.runs import whole_pages

COMMANDS = ("coordinator", "trainer", "rollout", "refit")
_DEADLINE_S = 400.0
"""A disk that has just got all packages may take minutes to read them, which three processes ask of it at once."""
_MODULES = (
    "tandem.coordinator.cli",
    "tandem.coordinator.preparing.preflight",
    "tandem.coordinator.loop.run",
    "tandem.coordinator.algorithms.grpo",
    "tandem.coordinator.algorithms.recorded",
    "tandem.observe.report.report",
    "matplotlib.backends.backend_agg",
    "reasoning_gym",
    "tests.harness.processes.stream_processes",
    "tests.harness.processes.shm_processes",
    "tests.harness.runs.preloaded",  # last: it ends with Megatron-Core, which is not installed beside vLLM
)


def start(command: str, arguments: Sequence[str], out: IO[bytes], errors: IO[bytes] | None = None) -> ForkedChild:
    """Start a console command with this process's folder and environment."""
    return fork_server().start(f"tandem.{command}.cli", arguments, out, errors)


@cache
def fork_server() -> ServiceForkServer:
    """Return what commands are forked from; it ends with this process."""
    return _OfAnInterpreter(_preload, _DEADLINE_S)


@cache
def fork_server_of_hub() -> ServiceForkServer:
    """Return what commands are forked from that ask the Hub which the environment named at the first call."""
    return _OfAnInterpreter(_preload_of_hub, _DEADLINE_S)


class _OfAnInterpreter(ServiceForkServer):
    """A fork_server that is a new interpreter and no fork of this process."""

    def _begin(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), self._preload.__name__]
            process = subprocess.Popen(words, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[3])
        leaks.of_harness.add(process.pid)
        return process, ours


def _preload() -> None:
    try:
        preload(("trainer", "rollout"))
        for module in _MODULES:
            importlib.import_module(module)
    finally:
        whole_pages.collapse()


def _preload_of_hub() -> None:
    importlib.import_module("datasets")
    _preload()


if __name__ == "__main__":
    preloads = {each.__name__: each for each in (_preload, _preload_of_hub)}
    serve(int(sys.argv[1]), int(sys.argv[2]), preloads[sys.argv[3]])
