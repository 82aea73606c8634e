"""The user's own code: imported by path; what it returns and raises, described."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.common.errors import ConfigError
from tandem.common.texts import visible


def named(path: str, key: str = "") -> Any:
    """Import the object at a path. Raises `ConfigError`, prefixed with the key that holds the path, if that fails."""
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        reason = str(error)
        if not isinstance(error, ImportError | AttributeError | ValueError):
            reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: cannot import {path!r}: {reason}") from error


_LONGEST_LINE = 600
_LONGEST_READ = 100_000
"""Longest part of a text that is looked at."""


def line(text: str) -> str:
    """Return text on one line of limited length, without control characters."""
    words = visible(" ".join(sayable(text[:_LONGEST_READ]).split()))
    return words if len(words) <= _LONGEST_LINE else f"{words[:_LONGEST_LINE]}..."


def sayable(text: str) -> str:
    """Return text that can be encoded: lone surrogates are escaped."""
    return text.encode(errors="backslashreplace").decode()


def locate_raise(trace: TracebackType | None, folder: str) -> str:
    """Return `` (FILE:LINE, in FUNCTION)`` for the innermost frame of the user's code, which lies in `folder`."""
    frames = traceback.extract_tb(trace)[1:]  # the first frame is the caller's
    if not frames:
        return ""
    user_frames = [frame for frame in frames if folder and os.path.dirname(os.path.abspath(frame.filename)) == folder]
    frame = (user_frames or frames)[-1]
    path = Path(frame.filename)
    with_folder = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" ({with_folder}:{frame.lineno}, in {frame.name})"


def shown(value: object) -> str:
    """Return the `repr` of a value for an error; the value's own class may fail to give one."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"
