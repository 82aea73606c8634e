"""``coordinator up --supervise``: start the coordinator again when it is killed.

The coordinator is a child of this process, which does nothing but wait for it. Where a signal ends it that this process
has not passed on, another goes on with the run as ``--resume`` does, at the same address if that has a port, once all
that the dead one had launched is gone. An exit code of its own is final: then it has said what there is to say.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.common import signals
from tandem.common.errors import RunFolderError
from tandem.common.process_lifetime import adopt_orphans
from tandem.coordinator.commands.arguments import FAILED, INTERRUPTED

_GONE_S = 20.0
"""How long the kernel may take to end what the coordinator has launched."""


class Supervisor:
    """Starts coordinators of one run, one after the other."""

    def __init__(self, words: Sequence[str], folder: Path, most: int) -> None:
        """`words` come after ``coordinator up``, but for how it begins. Of `most` that die others take the place."""
        self._words = words
        self._folder = folder
        self._most = most
        self._asked: list[int] = []
        """Signals that asked the run to end."""
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, how: Sequence[str]) -> int:
        """Bring the run to its end; `how` are the words that say how it begins. Return the exit code."""
        before = self._run_id()
        adopt_orphans()
        with signals.heard(self._pass_on):
            for num_deaths in range(self._most + 1):
                code = self._run_once(how)
                if code >= 0:
                    return code
                _reap()
                if self._asked:
                    return INTERRUPTED
                name = signal.Signals(-code).name
                if num_deaths == self._most:
                    break
                if "--resume" in how or self._run_id() != before:  # else it died before it had begun
                    how = ["--resume"]
                print(f"the coordinator was killed by {name}; it is started again", flush=True)
        print(f"error: the coordinator was killed by {name}; it was started {num_deaths + 1} times", file=sys.stderr)
        return FAILED

    def _run_once(self, how: Sequence[str]) -> int:
        program = [sys.executable, "-m", "tandem.coordinator.cli", "up"]
        owner = ["--supervised-by", str(os.getpid())]
        # In a group of its own, so that what a terminal sends to all reaches it once, by way of this process.
        self._process = subprocess.Popen([*program, *self._words, *how, *owner], process_group=0)
        return self._process.wait()

    def _pass_on(self, number: int) -> None:
        self._asked.append(number)
        if self._process is not None:
            self._process.send_signal(number)

    def _run_id(self) -> str | None:
        """Return the name of the run in the folder; None if there is none."""
        from tandem.coordinator.run.journal import read_journal

        with contextlib.suppress(RunFolderError), read_journal(self._folder) as journal:
            return journal.run_id
        return None


def _reap() -> None:
    """Wait until all is gone that a dead coordinator had started: the kernel ends it."""
    deadline = time.monotonic() + _GONE_S
    with contextlib.suppress(ChildProcessError):  # there is none any more
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
