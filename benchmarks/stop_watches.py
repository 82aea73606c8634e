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
    """Wrap a function so that each call of it is noted."""

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        done = plain(*arguments)
        with Path(os.environ[WATCHED]).open("a") as file:
            print(began, time.perf_counter(), file=file)
        return done

    return timed


def spans_in(file: Path) -> list[tuple[float, float]]:
    """Return when each noted call began and ended, in seconds of `time.perf_counter`."""
    times = (line.split() for line in file.read_text().splitlines())
    return [(float(began), float(ended)) for began, ended in times]
