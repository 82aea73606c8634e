"""What tests may leave on the machine: found among what other tests, and other programs, have there at the same time.

Every process that a test starts inherits a mark in its environment, also if it is orphaned on the way; what other
processes hold is theirs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

SETTLE_S = 30.0
"""How long what is on its way out may take."""
of_harness: set[int] = set()
"""Ids of processes that outlive a test on purpose: a fork server that is replaced, because it was slow, is no leak."""
_MARK = "TANDEM_TESTS_OF"
_SHARED_MEMORY = "/dev/shm"


def mark_processes() -> None:
    """Have whatever this process starts from now on tell whose it is."""
    os.environ[_MARK] = str(os.getpid())
    os.environ["SPT_NOENV"] = "1"  # or processes that give themselves a title would write it over their environment


class Started(psutil.Process):
    """A process, told from others by its id and the time it began, and not by what it runs.

    That changes while a process starts, between fork and exec.
    """

    def __repr__(self) -> str:
        with contextlib.suppress(psutil.NoSuchProcess):
            return f"{self.pid} {' '.join(self.cmdline()[:4])}"
        return f"{self.pid}"


def processes() -> set[Started]:
    """Return the processes that tests of this process have started."""
    return _started(_own())


def _started(own: Iterable[int]) -> set[Started]:
    found = set()
    for pid in own:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(Started(pid))
    return found


def pids() -> frozenset[int]:
    """Return the ids of all processes that there are, whoever has started them."""
    return frozenset(psutil.pids())


def new_processes(before: frozenset[int]) -> set[Started]:
    """Return the processes that tests of this process have started since there were `before`.

    Only what is new is looked at: it is done after every test, and all that a machine runs is ten times as much.
    """
    new = pids() - before - of_harness
    return _started(_own_among(new)) if new else set()


def _own() -> set[int]:
    """Return the ids of this process's descendants, and of orphans with its mark."""
    return _own_among(psutil.pids())


def _own_among(those: Iterable[int]) -> set[int]:
    """Return which of these are this process's descendants, or orphans with its mark."""
    mark, those = f"{_MARK}={os.getpid()}\0".encode(), {*those}
    found = those & {child.pid for child in psutil.Process().children(recursive=True)}
    for pid in those - found:
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
        except OSError:  # it has ended, or is another user's
            continue
    return found


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended may be collected late."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Iterable[int]) -> bool:
    """Wait for processes to end, for as long as what is on its way out may take; tell whether all have."""
    deadline, pids = time.monotonic() + SETTLE_S, [*pids]
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def listeners() -> set[str]:
    """Return the sockets of this process that listen."""
    return {str(c.laddr) for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def threads() -> set[str]:
    """Return the threads that would keep this process alive."""
    return {thread.name for thread in threading.enumerate() if not thread.daemon}


def segments() -> set[str]:
    """Return the names in shared memory, but for those of temporary folders."""
    return {name for name in os.listdir(_SHARED_MEMORY) if not name.startswith("tmp")}


def new_segments(before: set[str]) -> set[str]:
    """Return the names that came to shared memory since `before`, and that no process but a test's holds."""
    new = segments() - before
    if not new:
        return new
    own = _own() | {os.getpid()}
    held = {inode for pid in psutil.pids() if pid not in own for inode in _held_by(pid)}
    return {name for name in new if (inode := _inode(name)) is not None and inode not in held}


def segments_left(before: set[str]) -> set[str]:
    """Return `new_segments` once there are none, or the time to settle is over."""
    deadline = time.monotonic() + SETTLE_S
    while (left := new_segments(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _held_by(pid: int) -> set[int]:
    """Return the inodes in shared memory that a process has mapped; a semaphore's mapping has not the name it has."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended, or is another user's
        return set()
    return {int(line.split()[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}


def _inode(name: str) -> int | None:
    """Return the inode of a name in shared memory, None if it has gone while its holder was looked for."""
    try:
        return os.stat(f"{_SHARED_MEMORY}/{name}").st_ino
    except OSError:
        return None
