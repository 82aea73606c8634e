"""A problem with one key, before its file is known."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

MAX_SHOWN = 80
"""Most characters of a value in an error."""


class Invalid(Exception):
    """The value at a key cannot be used; `load` adds the file and makes it a `ConfigError`."""

    def __init__(self, key: str, text: str, more: tuple[Invalid, ...] = (), *, is_foreign: bool = False) -> None:
        self.key = key
        self.text = text
        self.is_foreign = is_foreign
        """Whether the key is unknown and no near miss of a known one."""
        self.all: tuple[Invalid, ...] = (self, *more)
        """This problem and those found with it."""
        super().__init__(f"{key}: {text}")


class Problems:
    """A collector of problems, so that all are reported at once."""

    def __init__(self) -> None:
        self.found: list[Invalid] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Catch the `Invalid` that the block raises, and continue after it."""
        try:
            yield
        except Invalid as problem:
            self.found += problem.all

    def complain(self) -> None:
        """Raise `Invalid` with everything found, unless nothing was."""
        if self.found:
            first, *others = self.found
            raise Invalid(first.key, first.text, tuple(others), is_foreign=first.is_foreign)


def shown(value: object) -> str:
    """Return a value as in YAML, on one line, shortened if it is long."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.splitlines())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
