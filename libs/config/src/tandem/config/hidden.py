"""Find the problems of a configuration that another problem hides.

A configuration is checked in stages: references, data sets, names and types, unbuilt features, rules. Each stage
needs the result of the one before. So the wrong keys are removed and the rest is checked again, until no new problem
appears. A problem that a later stage finds with a removed key, or because of its removal, is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tandem.config.layers import key_parts
from tandem.config.problem import Invalid
from tandem.config.schema import Config

_MOST_LOOKS = 10
_SUGGESTED = re.compile(r"did you mean '([^']+)'")


class Refused(NamedTuple):
    """The reasons why settings make no valid configuration."""

    unsupported: str | None
    """The line that lists enabled features that are not built; None if there are none."""
    problems: tuple[Invalid, ...]


Look = Callable[[dict[str, Any]], Config | Refused]


def with_hidden(found: Refused, settings: dict[str, Any], look: Look) -> Refused:
    """Return the problems found in settings, and those that they hid from `look`."""
    unsupported, problems = found
    told = _words([], unsupported)
    shown = [each for each in problems if not _repeats(each, told)] if unsupported else [*problems]
    told |= _words(problems)
    for _ in range(_MOST_LOOKS):
        mended = settings
        for problem in problems:
            mended = _without(mended, key_parts(problem.key))
        if mended == settings:
            break
        again = look(settings := mended)
        if isinstance(again, Config):
            break
        if unsupported is None and again.unsupported is not None:
            unsupported = again.unsupported
            told |= _words([], unsupported)
        problems = again.problems
        shown += [each for each in problems if not _repeats(each, told)]
        told |= _words(problems)
    return Refused(unsupported, tuple(shown))


def _repeats(problem: Invalid, told: set[str]) -> bool:
    """Tell whether a problem concerns or names a key that was already reported."""
    return bool(told & {key_parts(problem.key)[-1], *re.findall(r"\w+", problem.text)})


def _words(problems: Sequence[Invalid], unsupported: str | None = None) -> set[str]:
    """Return the last parts of all keys that problems concern or suggest."""
    texts = [f"{each.key} {' '.join(_SUGGESTED.findall(each.text))}" for each in problems]
    keys = re.findall(r"[\w.\[\]-]+", " ".join([*texts, (unsupported or "").partition(": ")[2]]))
    return {last for key in keys if (last := key_parts(key)[-1]) and not last.isdecimal()}


def _without(node: Any, parts: Sequence[str]) -> Any:
    """Return a copy of settings without a key; the settings themselves if they lack it."""
    head, *rest = parts
    if isinstance(node, dict) and head in node:
        if not rest:
            return {key: value for key, value in node.items() if key != head}
        return {**node, head: _without(node[head], rest)}
    if isinstance(node, list) and head.isdecimal() and int(head) < len(node) and rest:
        index = int(head)
        return [*node[:index], _without(node[index], rest), *node[index + 1 :]]
    return node
