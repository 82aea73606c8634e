"""The combinations of a sweep, values of keys and folders of runs, checked before anything starts."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tandem.common.errors import ConfigError, TandemError
from tandem.config import Config, config_from_json, load_config, resume_differences
from tandem.launch.preparing.beginning import Mode, has_begun
from tandem.observe.run_folder.journal import read_journal, state_of

Progress = Literal["new", "begun", "finished"]
_MOST_NAMED = 3
"""Runs that a problem names."""
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


class PlannedRun(msgspec.Struct, frozen=True):
    """A run of a sweep that has passed the checks."""

    combination: SweepCombination
    config: Config
    settings: tuple[str, ...]
    """Settings that replace the file's."""
    progress: Progress
    """How far an earlier call of the sweep has brought it."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.config.logger.log_dir)

    @property
    def log(self) -> Path:
        """File of what the run prints, next to its folder."""
        return self.folder.with_name(f"{self.combination.name}.log")


def plan_runs(path: str, runs: Sequence[SweepCombination], *, restarts: bool) -> list[PlannedRun]:
    """Load the configuration of each combination. Raises `ConfigError` with the problems of all of them.

    With `restarts`, what the folders hold does not matter.
    """
    problems = _Problems(len(runs))
    planned: list[PlannedRun] = []
    for run in runs:
        try:
            config, settings = _load(path, run)
        except ConfigError as error:
            problems.add(run, error)
            continue
        progress: Progress = "new"
        if has_begun(config) and not restarts:
            try:
                progress = _progress(config)
            except TandemError as error:
                problems.add(run, error)
        planned.append(PlannedRun(run, config, settings, progress))
    problems.add_missing(path)
    problems.complain(_same_models(planned))
    return planned


def check_runs(path: str, runs: Sequence[PlannedRun], all_runs: int) -> None:
    """Check models, data, custom code and packages of these runs, as ``coordinator check`` does.

    Raises `ConfigError` with the problems of all of them.
    """
    from tandem.coordinator.preparing.preflight import preflight

    problems = _Problems(all_runs)
    for run in runs:
        mode: Mode = "new" if run.progress == "new" else "resume"
        try:
            preflight(path, run.config, mode)
        except TandemError as error:
            problems.add(run.combination, error)
    problems.complain([])


def _load(path: str, run: SweepCombination) -> tuple[Config, tuple[str, ...]]:
    """Return a run's configuration, and its settings with those that keep its checkpoints apart from other runs'."""
    config = load_config(path, run.settings)
    log_dir = Path(config.logger.log_dir)
    if Path(config.checkpointing.checkpoint_dir).is_relative_to(log_dir):
        return config, run.settings
    settings = (*run.settings, f"checkpointing.checkpoint_dir={log_dir / 'checkpoints'}")
    return load_config(path, settings), settings


def _progress(config: Config) -> Progress:
    """Return how far the run in a folder is. Raises `ConfigError` if it is of another configuration."""
    folder = Path(config.logger.log_dir)
    with read_journal(folder) as journal:
        recorded = config_from_json(journal.config_json)
        state = state_of(folder, journal.last_event())
    if changed := resume_differences(recorded, config):
        raise ConfigError(
            f"{folder} holds a run that differs in {', '.join(changed)}: set it aside with --restart, or choose "
            "another logger.log_dir"
        )
    if state == "running":
        raise ConfigError(f"{folder} holds a run that is going on")
    return "finished" if state == "finished" and _length(recorded) == _length(config) else "begun"


def _length(config: Config) -> tuple[object, object]:
    """Return the settings that say how long a run trains."""
    section = getattr(config, config.algorithm)
    return section.max_num_steps, section.max_num_epochs


def _same_models(runs: Sequence[PlannedRun]) -> list[str]:
    """Return the problem of runs that would make different models in one folder."""
    models = defaultdict(set)
    for run in runs:
        policy = run.config.policy
        if policy.new_model is not None:
            models[policy.model_name].add(msgspec.json.encode(policy.new_model))
    return [
        f"policy.model_name: {name!r} would be {len(kinds)} different new models (policy.new_model); sweep the name too"
        for name, kinds in models.items()
        if len(kinds) > 1
    ]


class _Problems:
    """The problems of several runs, each said once."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._runs_of: dict[str, list[SweepCombination]] = {}
        self._first: tuple[SweepCombination, ConfigError] | None = None

    def add(self, run: SweepCombination, error: TandemError) -> None:
        """Note the problems of a run."""
        lines = error.problems if isinstance(error, ConfigError) else (str(error),)
        for line in lines:
            self._runs_of.setdefault(line, []).append(run)
        if isinstance(error, ConfigError) and self._first is None:
            self._first = run, error

    def add_missing(self, path: str) -> None:
        """Note what the first refused configuration names and does not exist, too."""
        if self._first is None:
            return
        from tandem.launch.preparing.missing import add_missing  # takes a while to import

        run, error = self._first
        for line in add_missing(error, path, [*run.settings], "new").problems:
            self._runs_of.setdefault(line, [run] * self._num_runs)

    def complain(self, more: Sequence[str]) -> None:
        """Raise `ConfigError` with all problems and some more, if there are any."""
        lines = [f"{line}{self._name_runs(runs)}" for line, runs in self._runs_of.items()]
        if lines or more:
            raise ConfigError(*lines, *more)

    def _name_runs(self, runs: Sequence[SweepCombination]) -> str:
        if len(runs) >= self._num_runs:
            return ""
        names = " and ".join(run.name for run in runs[:_MOST_NAMED])
        num_more = len(runs) - _MOST_NAMED
        return f" (in {names}{f' and {num_more} more' if num_more > 0 else ''})"
