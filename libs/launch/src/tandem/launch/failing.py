"""The report of a command that failed: what the coordinator is told, and what the process's log says."""

from __future__ import annotations

import contextlib
import sys
import traceback

from tandem.common.errors import TandemError
from tandem.common.messages import MAX_TEXT, MAX_TRACEBACK, Failed
from tandem.common.shortages import is_shortage
from tandem.common.texts import shorten


def describe_failure(name: str, command_id: int, error: BaseException, phase: str) -> Failed:
    """Return the report of an error of the process `name` in a phase, and print it."""
    expected = isinstance(error, TandemError) and error.is_final and not is_shortage(error)
    text = shorten(str(error) if isinstance(error, TandemError) else f"{type(error).__name__}: {error}")
    trace = (
        ""
        if isinstance(error, TandemError) and error.is_final
        else shorten("".join(traceback.format_exception(error)), MAX_TRACEBACK)
    )
    with contextlib.suppress(OSError):  # the log may be on the full disk that is reported here
        print(f"{name}: failed while {phase}: {trace or text}", file=sys.stderr, flush=True)
    return Failed(command_id=command_id, phase=phase[:MAX_TEXT], error=text, expected=expected, traceback=trace)
