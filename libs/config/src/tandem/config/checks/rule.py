"""Rules of a configuration: what one is, and which algorithms it holds for."""

from __future__ import annotations

import re
from collections.abc import Callable

from tandem.config.problem import Invalid, shown
from tandem.config.schema import Config

Rule = Callable[[Config], None]
"""Raises `Invalid` if the configuration breaks it."""


def where_it_rolls_out(*rules: Rule) -> tuple[Rule, ...]:
    """Return the rules as those of algorithms that roll out."""
    return tuple(_of(rule, rolls_out=True) for rule in rules)


def over_a_data_set(*rules: Rule) -> tuple[Rule, ...]:
    """Return the rules as those of algorithms over data sets."""
    return tuple(_of(rule, rolls_out=False) for rule in rules)


def check_dotted_path(key: str, path: str) -> None:
    """Raise `Invalid` if what should name a class cannot."""
    if not re.fullmatch(r"\w+(\.\w+)+", path):
        raise Invalid(key, f"{shown(path)} is not a dotted path, such as package.Class")


def _of(rule: Rule, *, rolls_out: bool) -> Rule:
    def checked(config: Config) -> None:
        if config.declaration.rolls_out == rolls_out:
            rule(config)

    return checked
