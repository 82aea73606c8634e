"""Every test leaves the machine as it found it: no process, socket, shared memory or thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import leaks

_SEGMENT_NAMES = ("torch_", "psm_", "sem.", "mp-", "tandem")
"""What libraries of ours would leave in shared memory: torch, multiprocessing, or Tandem itself."""
_LONG_FILES = (
    "test_workers.py",
    "test_asynchronous.py",
    "test_stale_samples.py",
    "test_deaths.py",
    "test_run.py",
    "test_two_hosts.py",
    "test_turns.py",
    "test_readme.py",
    "test_front_end.py",
)
"""They begin first where files run side by side, so that no process is left alone with one at the end."""
_LOOKS: dict[str, Callable[[], set[Any]]] = {
    "process": leaks.processes,
    "listening socket": leaks.listeners,
    "thread": leaks.threads,
}

leaks.mark_processes()
pytest.register_assert_rewrite("async_rollouts_cases")  # tests, in a module that is no test module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; `tox.ini` has pytest-xdist keep the order."""
    items.sort(key=lambda item: item.path.name not in _LONG_FILES)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks; what is still on its way out gets a few seconds."""
    before, segments = {what: look() for what, look in _LOOKS.items()}, leaks.segments()
    yield
    deadline = time.monotonic() + leaks.SETTLE_S
    while leaked := _leaked(before, segments):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {leaked}")
        time.sleep(0.05)


def _leaked(before: dict[str, set[Hashable]], segments: set[str]) -> dict[str, set[Hashable]]:
    """Return what there is now and was not before, by kind."""
    found: dict[str, set[Hashable]] = {what: look() - before[what] for what, look in _LOOKS.items()}
    found["segment"] = {name for name in leaks.new_segments(segments) if name.startswith(_SEGMENT_NAMES)}
    return {what: left for what, left in found.items() if left}


@pytest.fixture(autouse=True)
def own_working_directory(tmp_path: Path) -> Iterator[None]:
    """Run each test in its own folder: configurations name results relative to the working directory."""
    previous = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(previous)
