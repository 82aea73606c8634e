"""The checks of a sweep: every combination's configuration, before anything starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tandem.common.errors import ConfigError, TandemError
from tandem.config import Config, config_from_json, load_config, resume_differences
from tandem.coordinator.sweeping.combinations import SweepCombination
from tandem.launch.preparing.beginning import Mode, has_begun
from tandem.observe.run_folder.journal import read_journal, state_of

Progress = Literal["new", "begun", "finished"]
_MOST_NAMED = 3
"""Runs that a problem names."""


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
