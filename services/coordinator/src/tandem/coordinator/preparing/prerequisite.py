"""The prerequisite of a run, which makes its model: whether it is done, and how to begin it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.common.errors import ConfigError
from tandem.config import Config, config_from_json, resume_differences
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.observers.finished_steps import validation_stop
from tandem.launch.preparing.beginning import Mode, Say, has_begun
from tandem.observe.run_folder.checkpoints import checkpoints_of
from tandem.observe.run_folder.journal import JournalReader, read_journal


class CheckedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that passed its checks (see `tandem.coordinator.preparing.preflight`)."""

    config: Config
    source: str
    """Configuration file."""
    algorithm: RunningAlgorithm
    notices: tuple[str, ...]
    """Notices about its model and its data."""
    prerequisite: CheckedConfig | None
    """Run that comes before; None if its model exists and it has never begun here."""
    modules: dict[str, str] = {}
    """Paths of the user's own modules that its services import, by name."""


def is_done(ready: CheckedConfig) -> bool:
    """Return whether the run in the run folder has finished."""
    if not has_begun(ready.config):
        return False
    with read_journal(Path(ready.config.logger.log_dir)) as journal:
        return _has_finished(ready, journal)


def _has_finished(ready: CheckedConfig, journal: JournalReader) -> bool:
    """Return whether a run has done its last step, or ended before because its validation was good enough."""
    config, last = ready.config, journal.last_step() or 0
    if last >= ready.algorithm.num_steps:
        return True
    if not any(stop.is_reached(journal.steps()) for stop in validation_stop(config, list, lambda reason: None)):
        return False
    return not config.checkpointing.enabled or last in checkpoints_of(journal.folder, config).steps()


def choose_mode(ready: CheckedConfig, restarts: bool, say: Say) -> Mode | None:
    """Return how to run a prerequisite; None if it is done.

    If its configuration has changed since its run, it is made again if everything begins anew (`restarts`). Otherwise a
    finished one is kept as it is.
    """
    config, name = ready.config, f"prerequisite {ready.source}"
    if not has_begun(config):
        return "new"
    folder = Path(config.logger.log_dir)
    with read_journal(folder) as journal:
        last, has_finished = journal.last_step() or 0, _has_finished(ready, journal)
    changed = differences(ready)
    if changed and restarts:
        say(f"{name}: made again, because it differs from the run in {folder} in {changed}")
        return "restart"
    if not has_finished:
        if changed:
            raise ConfigError(
                f"{name}: the run in {folder} is at step {last} and differs in {changed}: begin it anew with --restart"
            )
        return "resume"
    say(f"{name}: done before ({last} steps in {folder}), its checkpoint is used again")
    if changed:
        say(f"note: {name} differs from that run in {changed}; --restart makes it again")
    return None


def differences(ready: CheckedConfig) -> str:
    """Return the keys that differ from the run in the run folder; empty if none, or if there is no run."""
    if not has_begun(ready.config):
        return ""
    with read_journal(Path(ready.config.logger.log_dir)) as journal:
        recorded = journal.config_json
    try:
        return ", ".join(resume_differences(config_from_json(recorded), ready.config))
    except ConfigError:
        return "keys that another release wrote"
