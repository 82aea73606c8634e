"""The type of rules, and the algorithms that a rule applies to."""

from __future__ import annotations

import re
from collections.abc import Callable

from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import Config

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
