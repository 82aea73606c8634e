"""Run a command while its processes stall at random, one after another, as they do on a machine with too much to do.

``python scripts/stalls.py python -m tests.suites unit -n 3`` shows which tests take a pause of a second for a failure.
``--longest-s 3`` before the command has them last for longer. A stall is a move to a frozen cgroup, which no process
notices: no signal is sent, and no parent is told. It needs Linux with cgroup v2, and root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_STALLERS = 3
_SHORTEST_S, _LONGEST_S = 0.2, 0.8
_PAUSE_S = 6.0
"""Mean pause of one that stalls processes, if there is one process; among more, each is stalled as often."""
_GONE_S = 10.0


class Stalls:
    """Two cgroups: one of processes that run, and a frozen one."""

    def __init__(self, folder: Path, longest_s: float = _LONGEST_S) -> None:
        """Make both cgroups within a new one, `folder`."""
        self._longest_s = longest_s
        self._folder, self._running, self._frozen = folder, folder / "running", folder / "frozen"
        for each in (self._folder, self._running, self._frozen):
            each.mkdir()
        (self._frozen / "cgroup.freeze").write_text("1")
        self._stalled: set[int] = set()
        self._ends = threading.Event()
        self.count = 0
        """Stalls so far."""

    def join(self) -> None:
        """Add this process to those that may stall, with all that it starts."""
        _move(os.getpid(), self._running)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Stall processes within the block."""
        threads = [threading.Thread(target=self._stall) for _ in range(_STALLERS)]
        threads.append(threading.Thread(target=self._free_forks))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Remove both cgroups; kill what has stayed in them."""
        (self._folder / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + _GONE_S
        while (_pids(self._running) or _pids(self._frozen)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for each in (self._running, self._frozen, self._folder):
            each.rmdir()

    def _stall(self) -> None:
        while not self._ends.is_set():
            if pids := _pids(self._running):
                pid = random.choice(pids)
                self._stalled.add(pid)
                if _move(pid, self._frozen):
                    time.sleep(random.uniform(_SHORTEST_S, self._longest_s))
                    self.count += _move(pid, self._running)
                self._stalled.discard(pid)
            self._ends.wait(random.uniform(0.0, 2 * _PAUSE_S / max(1, len(pids))))

    def _free_forks(self) -> None:
        """Move back what was forked by a process on its way into the frozen cgroup."""
        while not self._ends.wait(0.5):
            for pid in {*_pids(self._frozen)} - self._stalled:
                _move(pid, self._running)


def _pids(cgroup: Path) -> list[int]:
    return [int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()]


def _move(pid: int, cgroup: Path) -> bool:
    """Move a process to a cgroup; return False if it has ended."""
    try:
        (cgroup / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def root_of_cgroups() -> Path | None:
    """Return where cgroup v2 is mounted and may be changed; None if it is not."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2" and _may_be_changed(Path(folder)):
            return Path(folder)
    return None


def _may_be_changed(root: Path) -> bool:
    """Try it: move a process to a new cgroup."""
    probe = root / f"stalls-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        with subprocess.Popen(["sleep", "60"]) as process:
            was_moved = _move(process.pid, probe)
            process.kill()
        return was_moved and (probe / "cgroup.freeze").exists()
    finally:
        probe.rmdir()


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--longest-s", type=float, default=_LONGEST_S, help="longest stall, in seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    arguments = parser.parse_args(argv)
    command = arguments.command
    if not command:
        parser.error("a command is missing")
    if (root := root_of_cgroups()) is None:
        parser.error("cgroup v2 is not mounted here, or may not be changed by this user")
    stalls = Stalls(root / f"stalls-{os.getpid()}", arguments.longest_s)
    try:
        with stalls.going_on():
            code = subprocess.run(command, preexec_fn=stalls.join, check=False).returncode
    finally:
        stalls.close()
    print(f"{stalls.count} stalls of {_SHORTEST_S} to {arguments.longest_s} s")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
