"""Processes that run out of descriptors."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator

_LIMITING = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)),) * 2)\n"


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[Callable[[], None]]:
    """Leave this process so many more descriptors, until what is yielded is called, or to the end of the block."""
    collects = gc.isenabled()
    gc.collect()  # files of earlier tests that wait for it would leave a descriptor when it comes
    gc.disable()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken: list[int] = []

    def end() -> None:
        while taken:
            os.close(taken.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        if collects:
            gc.enable()

    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield end
    finally:
        end()


def limited(limit: int, source: str, *arguments: str) -> list[str]:
    """Return the command of a Python program that may have so many descriptors, the first three included."""
    return [sys.executable, "-c", _LIMITING + source, str(limit), *arguments]


def said_by_limited(limit: int, source: str, *arguments: str, timeout_s: float = 60.0) -> str:
    """Run such a program to its end, and return what it prints; it must succeed."""
    ended = subprocess.run(
        limited(limit, source, *arguments), capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
