"""The combinations of a sweep: values of keys, the settings of each run, and its folder; pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import ConfigError

MOST_RUNS = 1_000
_FOLDER_KEY = "logger.log_dir"
_LONGEST_NAME = 120
"""Most characters of a folder's name: file systems allow 255 bytes."""
_LONGEST_VALUE = 40
_OPENING, _CLOSING = "([{", ")]}"


class SweptKey(msgspec.Struct, frozen=True):
    """A key with several values, as they were typed."""

    key: str
    values: tuple[str, ...]


class SweepSettings(msgspec.Struct, frozen=True):
    """The settings of a sweep's command line."""

    swept: tuple[SweptKey, ...]
    fixed: tuple[str, ...]
    """Settings of all runs, as ``key=value``."""

    @property
    def num_runs(self) -> int:
        """Number of combinations."""
        return math.prod(len(each.values) for each in self.swept)


class SweepCombination(msgspec.Struct, frozen=True):
    """A run of a sweep."""

    name: str
    """Name of its folder: ``seed=1,lr=1e-6``."""
    values: tuple[str, ...]
    """A value for each swept key."""
    settings: tuple[str, ...]
    """Settings that replace the file's."""


def parse_sweep(words: Sequence[str]) -> SweepSettings:
    """Divide settings into those with several values, ``key=1,2``, and others. Raises `ConfigError` with all problems.

    Commas within brackets or quotation marks divide nothing: ``key=[1,2]`` is one value.
    """
    problems: list[str] = []
    swept: list[SweptKey] = []
    fixed: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        values = tuple(value.strip() for value in _divide(text))
        if len(values) == 1:
            fixed.append(word)
        elif "" in values:
            problems.append(f"command line: {key}: {text!r} has an empty value; a text with a comma needs quotes")
        elif len({*values}) < len(values):
            problems.append(f"command line: {key}: {text!r} has the same value twice")
        elif key == _FOLDER_KEY:
            problems.append(f"command line: {key}: each run of a sweep has a folder of its own; give one, for all")
        elif key in (each.key for each in swept):
            problems.append(f"command line: {key}: swept twice; give all of its values at once")
        else:
            swept.append(SweptKey(key, values))
    settings = SweepSettings(tuple(swept), tuple(fixed))
    if not swept and not problems:
        problems.append("command line: no key has several values, such as grpo.seed=1,2,3")
    if settings.num_runs > MOST_RUNS:
        problems.append(f"command line: {settings.num_runs:,} combinations are more than {MOST_RUNS:,}")
    if problems:
        raise ConfigError(*problems)
    return settings


def combinations(settings: SweepSettings, root: Path) -> list[SweepCombination]:
    """Return all combinations, the last key's values next to each other, with folders below `root`."""
    labels = _labels([each.key for each in settings.swept])
    runs: list[SweepCombination] = []
    names: set[str] = set()
    for values in itertools.product(*(each.values for each in settings.swept)):
        name = ",".join(f"{label}={_make_path_part(value)}" for label, value in zip(labels, values, strict=True))
        if len(name) > _LONGEST_NAME or name in names:
            name = f"{name[:_LONGEST_NAME]}-{len(runs) + 1}"
        names.add(name)
        assignments = [f"{each.key}={value}" for each, value in zip(settings.swept, values, strict=True)]
        folder = f"{_FOLDER_KEY}={root / name}"
        runs.append(SweepCombination(name, values, (*settings.fixed, *assignments, folder)))
    return runs


def representatives(settings: SweepSettings, runs: Sequence[SweepCombination]) -> list[SweepCombination]:
    """Return as few of the combinations as have each value of each key once."""
    longest = max(len(each.values) for each in settings.swept)
    value_sets = {tuple(each.values[turn % len(each.values)] for each in settings.swept) for turn in range(longest)}
    return [run for run in runs if run.values in value_sets]


def _divide(text: str) -> Iterator[str]:
    """Yield the parts between commas that are not within brackets or quotation marks."""
    depth, quote, begin = 0, "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and not text[begin:place].strip():
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def _labels(keys: Sequence[str]) -> list[str]:
    """Return the shortest ends of dotted keys that tell them apart."""
    parts = [key.split(".") for key in keys]
    for depth in range(1, max(map(len, parts)) + 1):
        ends = [".".join(each[-depth:]) for each in parts]
        if len({*ends}) == len(ends):
            return ends
    raise AssertionError("keys differ")


def _make_path_part(value: str) -> str:
    """Return a value as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")[:_LONGEST_VALUE] or "_"
