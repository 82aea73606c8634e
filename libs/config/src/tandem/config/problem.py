"""A problem with one key, before its file is known; and rules, the checks that find one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tandem.config.schema import Config

MAX_SHOWN = 80
"""Most characters of a value in an error."""


class UnknownKey(NamedTuple):
    """A key that this release does not know."""

    near: tuple[str, ...] = ()
    """Known keys beside it that it may be a slip of, in full, the likeliest first."""
    meant: str = ""
    """Key beside it that the error suggests, in full; empty if it suggests none."""
    is_misplaced: bool = False
    """Whether other sections have a key of that name."""
    is_idle: bool = False
    """Whether its value switches nothing on: neither here nor at any of the keys that it may be a slip of."""


class InvalidValue(Exception):
    """The value at a key cannot be used; `load` adds the file and makes it a `ConfigError`."""

    def __init__(
        self,
        key: str,
        text: str,
        more: tuple[InvalidValue, ...] = (),
        *,
        unknown: UnknownKey | None = None,
        is_of_machine: bool = False,
    ) -> None:
        self.key = key
        self.text = text
        self.unknown = unknown
        """Whether the key is unknown, and then what it may mean; None for a known key."""
        self.is_of_machine = is_of_machine
        """Whether the value is right, and this machine lacks what it needs."""
        self.all: tuple[InvalidValue, ...] = (self, *more)
        """This problem and those found with it."""
        super().__init__(f"{key}: {text}")


class ProblemCollector:
    """A collector of problems, so that all are reported at once."""

    def __init__(self) -> None:
        self.found: list[InvalidValue] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Catch the `InvalidValue` that the block raises, and continue after it."""
        try:
            yield
        except InvalidValue as problem:
            self.found += problem.all

    def complain(self) -> None:
        """Raise `InvalidValue` with everything found, unless nothing was."""
        if self.found:
            first, *later_problems = self.found
            of_machine = first.is_of_machine
            raise InvalidValue(
                first.key, first.text, tuple(later_problems), unknown=first.unknown, is_of_machine=of_machine
            )


def shown(value: object) -> str:
    """Return a value as in YAML, on one line, shortened if it is long."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.splitlines())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def describe_without_effect(key: str, value: Any, reason: str) -> str:
    """Return the notice that a value has no effect."""
    return f"{key} ({value if isinstance(value, str) else shown(value)}) has no effect: {reason}"


Rule = Callable[[Config], None]
"""A check that raises `InvalidValue` if the configuration breaks it."""


def restrict_to_rollouts(*rules: Rule) -> tuple[Rule, ...]:
    """Restrict rules to algorithms that roll out."""
    return tuple(_restrict(rule, rolls_out=True) for rule in rules)


def restrict_to_data_sets(*rules: Rule) -> tuple[Rule, ...]:
    """Restrict rules to algorithms over data sets."""
    return tuple(_restrict(rule, rolls_out=False) for rule in rules)


def check_dotted_path(key: str, path: str) -> None:
    """Raise `InvalidValue` if a path cannot name a class."""
    if not re.fullmatch(r"\w+(\.\w+)+", path):
        raise InvalidValue(key, f"{shown(path)} is not a dotted path, such as package.Class")


def _restrict(rule: Rule, *, rolls_out: bool) -> Rule:
    def checked(config: Config) -> None:
        if config.declaration.rolls_out == rolls_out:
            rule(config)

    return checked
