"""Models, data sets and classes that a refused configuration names and that do not exist.

A configuration with wrong keys is not checked any further, except for this, so that all is said at once: whatever its
other keys name is looked for, within a deadline. Nothing is fetched.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tandem.common.errors import ConfigError, TandemError
from tandem.config import ValidPart, load_config, valid_part
from tandem.launch.launch import make_importable
from tandem.launch.preparing import beginning, custom_code, hub_data, needed_models

LOOK_S = 15.0
"""Deadline for all that is looked for. What has not answered by then is said once the keys are right."""
_CANNOT_LOOK = (ArithmeticError, LookupError, OSError, TypeError, ValueError)
"""Errors where a key that is wrong would be needed, and its default or stand-in misleads."""
_NO_IMPORT = ": cannot import "


def add_missing(error: ConfigError, path: str, overrides: list[str], mode: beginning.Mode) -> ConfigError:
    """Return the error of a refused configuration, with a line for each thing that it names and does not exist."""
    part = valid_part(path, overrides)
    lines = [] if part is None else _find_missing(path, part, mode)
    return type(error)(*error.problems, *(line for line in lines if not _is_repeated(line, error.problems)))


def _find_missing(path: str, part: ValidPart, mode: beginning.Mode) -> list[str]:
    """Return a line, which begins with file and key, for each thing that does not exist."""
    problems: list[str] = []
    ends_at = time.monotonic() + LOOK_S
    make_importable(path)
    try:
        earlier = None if part.config.prerequisite is None else load_config(part.config.prerequisite)
        with (
            tempfile.TemporaryDirectory() as scratch,
            custom_code.import_apart(part.config, Path(scratch), LOOK_S) as imported,
        ):
            _run_together(
                ends_at,
                lambda: hub_data.find_missing_data(part.config, mode, problems.append),
                lambda: needed_models.find_missing_models(part.config, mode, earlier, problems.append),
            )
            try:
                imported()
            except ConfigError as error:
                problems += [line for line in error.problems if _NO_IMPORT in line]
    except ConfigError as error:
        problems += [f"prerequisite: {line}" for line in error.problems]
    except (TandemError, *_CANNOT_LOOK):
        pass
    return [f"{part.source_of(line.partition(': ')[0])}: {line}" for line in [*problems]]


def _run_together(ends_at: float, *looks: Callable[[], None]) -> None:
    """Look in several places at once, until a time; what the Hub has not answered by then is left out."""

    def guarded(look: Callable[[], None]) -> None:
        with contextlib.suppress(TandemError, *_CANNOT_LOOK):
            look()

    threads = [threading.Thread(target=guarded, args=(look,), name="looking", daemon=True) for look in looks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_at - time.monotonic()))


def _is_repeated(line: str, problems: tuple[str, ...]) -> bool:
    """Return whether a problem of the same key was found."""
    _, key, _ = line.split(": ", 2)
    return any(f"{key}: " in problem for problem in problems)
