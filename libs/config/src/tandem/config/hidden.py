"""Find the problems of a configuration that another problem hides.

A configuration is checked in stages: references, data sets, names and types, unbuilt features, rules. Each stage
needs the result of the one before. So the wrong keys are removed and the rest is checked again, until no new problem
appears. A problem that a later stage finds with a removed key, or because of its removal, is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tandem.config.layers import split_key
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config

_MOST_LOOKS = 10
_SUGGESTED = re.compile(r"did you mean '([^']+)'")
_KEY = re.compile(r"[\w.\[\]-]+")


class RefusedSettings(NamedTuple):
    """The reasons why settings make no valid configuration."""

    unsupported: str | None
    """The line that lists enabled features that are not built; None if there are none."""
    problems: tuple[InvalidValue, ...]


def remove_wrong_keys(settings: dict[str, Any], look: Look) -> dict[str, Any]:
    """Return settings without the keys that `look` finds a problem with, as far as they can be removed."""
    for _ in range(_MOST_LOOKS):
        outcome = look(settings)
        if isinstance(outcome, Config):
            break
        mended = settings
        for problem in outcome.problems:
            mended = remove_key(mended, split_key(problem.key))
        if mended == settings:
            break
        settings = mended
    return settings


Look = Callable[[dict[str, Any]], Config | RefusedSettings]


def add_hidden(refused: RefusedSettings, settings: dict[str, Any], look: Look) -> RefusedSettings:
    """Return the problems found in settings, and those that they hid from `look`."""
    unsupported, problems = refused
    told_names = _list_named_keys([], unsupported)
    shown = [each for each in problems if not _is_repeated(each, told_names)] if unsupported else [*problems]
    told_names |= _list_named_keys(problems)
    for _ in range(_MOST_LOOKS):
        mended = settings
        for problem in problems:
            if not problem.is_of_machine:  # without its key, other rules would apply
                mended = remove_key(mended, split_key(problem.key))
        if mended == settings:
            break
        again = look(settings := mended)
        if isinstance(again, Config):
            break
        if unsupported is None and again.unsupported is not None:
            unsupported = again.unsupported
            told_names |= _list_named_keys([], unsupported)
        problems = again.problems
        shown += [each for each in problems if not _is_repeated(each, told_names)]
        told_names |= _list_named_keys(problems)
    return RefusedSettings(unsupported, tuple(shown))


def _is_repeated(problem: InvalidValue, told_names: set[str]) -> bool:
    """Tell whether a problem is of a key that was told of, names one, or is of the section that lacks it."""
    if any(problem.key == key.rpartition(".")[0] for key in told_names):
        return True
    named = {each.rstrip(".") for each in _KEY.findall(problem.text)}
    return bool(told_names & {*_list_names(problem.key), *named, *(each.rpartition(".")[2] for each in named)})


def _list_named_keys(problems: Sequence[InvalidValue], unsupported: str | None = None) -> set[str]:
    """Return the names of all keys that problems are of, or are meant by them."""
    keys = {*_KEY.findall((unsupported or "").partition(": ")[2]), *(problem.key for problem in problems)}
    for problem in problems:
        if problem.text.startswith("unknown key"):  # elsewhere it is a value that is suggested
            parent = problem.key.rpartition(".")[0]
            keys |= {f"{parent}.{meant}" if parent else meant for meant in _SUGGESTED.findall(problem.text)}
    return {name for key in keys for name in _list_names(key)}


def _list_names(key: str) -> set[str]:
    """Return what a key is called: in full, and by its last part, unless that may be any key's, as `name` may."""
    last = split_key(key)[-1]
    return {key, last} if "_" in last else {key}


def remove_key(node: Any, parts: Sequence[str]) -> Any:
    """Return a copy of settings without a key; the settings themselves if they lack it."""
    head, *inner_parts = parts
    if isinstance(node, dict) and head in node:
        if not inner_parts:
            return {key: value for key, value in node.items() if key != head}
        return {**node, head: remove_key(node[head], inner_parts)}
    if isinstance(node, list) and head.isdecimal() and int(head) < len(node) and inner_parts:
        index = int(head)
        return [*node[:index], remove_key(node[index], inner_parts), *node[index + 1 :]]
    return node
