"""Every test leaves the machine as it found it: no process, socket, shared memory or thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_SETTLE_S = 5.0
_SEGMENT_NAMES = ("torch_", "psm_", "sem.", "mp-", "tandem")
"""Other programs of the machine use the folder too."""


def _children() -> set[str]:
    return {f"{child.pid} {' '.join(child.cmdline()[:4])}" for child in psutil.Process().children(recursive=True)}


def _listeners() -> set[str]:
    return {str(c.laddr) for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def _segments() -> set[str]:
    """Return what libraries of ours would leave in /dev/shm: torch, multiprocessing, or Tandem itself."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(_SEGMENT_NAMES)}


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if not thread.daemon}


_LEAKS = {"child process": _children, "listening socket": _listeners, "segment": _segments, "thread": _threads}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks; what is still on its way out gets a few seconds."""
    before = {what: look() for what, look in _LEAKS.items()}
    yield
    deadline = time.monotonic() + _SETTLE_S
    while leaked := {what: left for what, look in _LEAKS.items() if (left := look() - before[what])}:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {leaked}")
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def own_working_directory(tmp_path: Path) -> Iterator[None]:
    """Run each test in its own folder: configurations name results relative to the working directory."""
    previous = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(previous)
