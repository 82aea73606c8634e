"""What tests leave behind is found, also of a process that is no longer their child; what others have is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import leaks

SEGMENT = "open(sys.argv[1], 'w+b'); os.truncate(held.fileno(), 4096); mapped = mmap.mmap(held.fileno(), 4096)"
SEMAPHORE = "multiprocessing.get_context('spawn').Lock(); name = 'sem.' + held._semlock.name.lstrip('/')"
START = """
import subprocess, sys
code = "import mmap, multiprocessing, os, sys, time\\nname = os.path.basename(sys.argv[1])\\nheld = " + sys.argv[2]
code += "\\nprint(os.getpid(), name, flush=True)\\ntime.sleep(60)"
pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
started = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], **pipes)
print(started.stdout.readline(), flush=True)
"""


@contextmanager
def orphan(path: Path, holding: str) -> Iterator[tuple[str, str]]:
    """Start a process that holds something in shared memory and whose parent has ended; yield its id and the name."""
    command = [sys.executable, "-c", START, str(path), holding]
    pid, name = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True, text=True).stdout.split()
    try:
        yield pid, name
    finally:
        os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def path() -> Iterator[Path]:
    """Return where a process may make a segment; it is gone after the test."""
    path = Path(f"/dev/shm/tandem-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def test_an_orphan_and_what_it_leaves_in_shared_memory_are_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, segments, pids = leaks.processes(), leaks.segments(), leaks.pids()
    with orphan(path, SEGMENT) as (pid, name):
        assert [process.pid for process in leaks.processes() - processes] == [int(pid)]
        assert [process.pid for process in leaks.new_processes(pids)] == [int(pid)]
        assert name in leaks.new_segments(segments)
    monkeypatch.setattr(leaks, "SETTLE_S", 0.2)
    assert name in leaks.segments_left(segments)


@pytest.mark.parametrize("holding", [SEGMENT, SEMAPHORE])
def test_what_a_process_of_others_holds_is_theirs(holding: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, segments, pids = leaks.processes(), leaks.segments(), leaks.pids()
    monkeypatch.setenv("TANDEM_TESTS_OF", "others")
    with orphan(path, holding) as (_, name):
        assert name in leaks.segments() - segments
        assert name not in leaks.new_segments(segments)
        assert leaks.processes() == processes
        assert leaks.new_processes(pids) == set()
