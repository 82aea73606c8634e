"""Stop-watches within the processes of a run that is otherwise as any other: they note spans in a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WATCHED = "WATCHED"
"""Environment variable: file in which a process notes when its work began and ended."""


def noted(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that each call of it is noted.

    The file stays open: to open it takes longer than some calls, and would count as time between them.
    """
    file = os.open(os.environ[WATCHED], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        done = plain(*arguments, **options)
        os.write(file, f"{began} {time.perf_counter()}\n".encode())
        return done

    return timed


def spans_in(file: Path) -> list[tuple[float, float]]:
    """Return when each noted call began and ended, in seconds of `time.perf_counter`."""
    times = (line.split() for line in file.read_text().splitlines())
    return [(float(began), float(ended)) for began, ended in times]
