"""Keys of a newer NeMo-RL than is known here: ignored with a notice, where a file says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tandem.config.dump import escaped
from tandem.config.hidden import Look, RefusedSettings, without
from tandem.config.layers import ConfigLayers, key_parts
from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import Config

NEWER = "newer"
"""Value of ``nemo_rl_version`` that names no release."""
HOW_TO_IGNORE = "; if a newer NeMo-RL knows it, --newer ignores it"
"""End of the error for an unknown key that is no near miss of a known one."""
NOT_KNOWN = "is not known to this release: no effect"
"""End of the notice about an ignored key."""
_LATEST = (0, 7)
"""Latest release of NeMo-RL whose keys are all known."""
_MOST_LOOKS = 20


def without_foreign(
    layers: ConfigLayers, look: Look, interpolated: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[dict[str, Any], Config | RefusedSettings]:
    """Return settings without the keys of a newer release, which ``ignored`` lists then, and what `look` finds."""
    settings = layers.merged
    version = settings.get("nemo_rl_version")
    if isinstance(version, float):  # written without quotes
        version = str(version)
        settings = {**settings, "nemo_rl_version": version}
    outcome = look(settings)
    for _ in range(_MOST_LOOKS if is_newer(version) else 0):
        if isinstance(outcome, Config):
            break
        foreign = [problem for problem in outcome.problems if is_foreign(problem, layers)]
        fewer = settings
        foreign = [_as_written(problem, settings) for problem in foreign]
        for problem in foreign:
            fewer = without(fewer, key_parts(problem.key))
        if fewer == settings:
            break
        listed = settings.get("ignored") or ()
        new_lines = [line for line in _lines(interpolated(settings), foreign) if line not in listed]
        settings = {**fewer, "ignored": [*listed, *escaped(new_lines)]}
        outcome = look(settings)
    return settings, outcome


def _as_written(problem: InvalidValue, settings: dict[str, Any]) -> InvalidValue:
    """Return a problem with the key that the settings have: a list of one teacher becomes the teacher."""
    teachers = settings.get("teachers")
    if problem.key.startswith("teacher.") and isinstance(teachers, list) and len(teachers) == 1:
        return InvalidValue(
            f"teachers[0].{problem.key.removeprefix('teacher.')}", problem.text, unknown=problem.unknown
        )
    return problem


def is_foreign(problem: InvalidValue, layers: ConfigLayers) -> bool:
    """Tell whether an unknown key is a name of its own, of a newer release, rather than a slip of the pen.

    It is no slip of a key that stands beside it in the same file. Nor does a slip matter if its value switches
    nothing on, and no file sets the key that may be meant.
    """
    unknown = problem.unknown
    if unknown is None or unknown.is_misplaced:
        return False
    if not unknown.near or layers.are_set_together(problem.key, unknown.near[0]):
        return True
    return unknown.is_idle and not any(map(layers.is_set, unknown.near))


def is_newer(version: Any) -> bool:
    """Tell whether keys of a release may be unknown here."""
    if version == NEWER:
        return True
    is_number = isinstance(version, str) and re.fullmatch(r"\d+\.\d+(\.\d+)*", version) is not None
    return is_number and tuple(map(int, version.split(".")[:2])) > _LATEST


def _lines(settings: dict[str, Any], problems: list[InvalidValue]) -> list[str]:
    """Return a notice about the key of each problem."""
    values = [_value_at(settings, key_parts(each.key)) for each in problems]
    return [f"{each.key} ({_plain(value)}) {NOT_KNOWN}" for each, value in zip(problems, values, strict=True)]


def _value_at(node: Any, parts: list[str]) -> Any:
    """Return the value at a key; None where the settings have it in another place."""
    for part in parts:
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else None
    return node


def _plain(value: Any) -> str:
    return shown(value) if not isinstance(value, str) else shown(value).strip("'")
