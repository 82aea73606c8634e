"""Texts from outside, shown safely: shortened, and without control characters."""

from __future__ import annotations

import os
import re
from pathlib import Path

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters, which may move the cursor or do worse to a terminal; models and processes can print any text."""
_MOST = 10_000
_MOST_OF_TAIL = 4000
_MOST_OF_LINE = 1000
_TAIL_OF_ERRORS = 40
"""Lines from the end within which a command's error is looked for."""


def visible(text: str) -> str:
    r"""Return a text with its control characters escaped, as ``\x1b``; newlines and tabs stay."""
    return CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def shorten(text: str, max_length: int = _MOST) -> str:
    """Return a visible text of at most `max_length` characters, with a note of the full length if it was cut."""
    shown = visible(text[:max_length])
    if len(text) <= max_length and len(shown) <= max_length:
        return shown
    note = f"... ({len(text)} characters in all)"
    return shown[: max(0, max_length - len(note))] + note


def read_last_lines(file: Path, count: int) -> list[str]:
    """Return the last lines of a log, each visible and short, reading only its end. Raises `OSError`."""
    with file.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _MOST_OF_TAIL))
        return read_last(log.read().decode(errors="replace"), count)


def read_last_error(log: Path) -> str:
    """Return the last error in what a command has printed, or else its last line. Raises `OSError`."""
    lines = [line for line in read_last_lines(log, _TAIL_OF_ERRORS) if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]  # a line after it says how to continue
    return (errors or lines or ["it has printed nothing"])[-1]


def read_last(text: str, count: int) -> list[str]:
    """Return the last lines of a text, each visible and short."""
    return [shorten(line, _MOST_OF_LINE) for line in text.strip().split("\n")[-count:] if line]
