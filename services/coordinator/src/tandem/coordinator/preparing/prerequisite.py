"""The model that a run begins from: made from scratch, or by the prerequisite run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from tandem.common.errors import ConfigError, ModelError
from tandem.config import Config, config_from_json, resume_differences
from tandem.config.models.lora import why_no_model
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.observers.stopping import validation_stop
from tandem.observe.run_folder.journal import JournalReader, read_journal
from tandem.observe.run_folder.journal_errors import JOURNAL_NAME
from tandem.observe.run_folder.recorded import checkpoints_of
from tandem.samples.model_files import write_new_model

Mode = Literal["new", "resume", "restart"]
Say = Callable[[str], None]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that passed its checks (see `tandem.coordinator.preparing.preflight`)."""

    config: Config
    source: str
    """Configuration file."""
    algorithm: RunningAlgorithm
    notices: tuple[str, ...]
    """Notices about its model and its data."""
    prerequisite: Ready | None
    """Run that comes before; None if its model exists and it has never begun here."""


def has_begun(config: Config) -> bool:
    """Return whether there is a run in the run folder."""
    return (Path(config.logger.log_dir) / JOURNAL_NAME).exists()


def is_done(ready: Ready) -> bool:
    """Return whether the run in the run folder has finished."""
    if not has_begun(ready.config):
        return False
    with read_journal(Path(ready.config.logger.log_dir)) as journal:
        return _has_finished(ready, journal)


def _has_finished(ready: Ready, journal: JournalReader) -> bool:
    """Return whether a run has done its last step, or ended before because its validation was good enough."""
    config, last = ready.config, journal.last_step() or 0
    if last >= ready.algorithm.num_steps:
        return True
    if not any(stop.is_reached(journal.steps()) for stop in validation_stop(config, list, lambda why: None)):
        return False
    return not config.checkpointing.enabled or last in checkpoints_of(journal.folder, config).steps()


def how_to_begin(ready: Ready, restarts: bool, say: Say) -> Mode | None:
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


def differences(ready: Ready) -> str:
    """Return the keys that differ from the run in the run folder; empty if none, or if there is no run."""
    if not has_begun(ready.config):
        return ""
    with read_journal(Path(ready.config.logger.log_dir)) as journal:
        recorded = journal.config_json
    try:
        return ", ".join(resume_differences(config_from_json(recorded), ready.config))
    except ConfigError:
        return "keys that another release wrote"


def model_problem(config: Config) -> str | None:
    """Describe the problem with the model's folder; None if it exists or is to be made from scratch."""
    folder = Path(config.policy.model_name)
    if folder.exists():
        if (why := why_no_model(folder)) is not None:
            return f"policy.model_name: {why}"
        if not (folder / "config.json").exists():
            return f"policy.model_name: {str(folder)!r} holds no config.json, so it is not a model"
    elif config.policy.new_model is None:
        return (
            f"policy.model_name: {str(folder)!r} does not exist, and neither policy.new_model nor prerequisite makes it"
        )
    return None


def make_model(config: Config, mode: Mode, say: Say) -> None:
    """Write the folder of a model that is made from scratch; check that any other local model exists.

    A folder that differs from ``policy.new_model`` is kept, or set aside if the run begins anew.
    """
    if (problem := model_problem(config)) is not None:
        raise ModelError(problem)
    new, folder = config.policy.new_model, Path(config.policy.model_name)
    if new is None:
        return
    if folder.exists():
        differences = model_differences(config)
        if not differences:
            return
        if mode != "restart":
            say(f"note: policy.new_model differs from {folder} in {differences}; --restart makes it again")
            return
        say(f"{folder} is made again, because policy.new_model differs from it in {differences}")
        set_aside(folder, say)
    write_new_model(folder, new)
    say(f"new {new.config['model_type']} model in {folder}")


def model_differences(config: Config) -> str:
    """Return the keys of ``policy.new_model`` that differ from the existing folder; empty if none."""
    new, folder = config.policy.new_model, Path(config.policy.model_name)
    if new is None or not folder.exists():
        return ""
    there = _read(folder / "config.json")
    differing = [f"config.{key}" for key, value in new.config.items() if _differs(there.get(key, ...), value)]
    vocabulary = _read(folder / "tokenizer.json").get("model", {}).get("vocab", {})
    if {token for token in vocabulary if len(token) == 1} != set(new.characters):
        differing.append("characters")
    return ", ".join(differing)


def _differs(there: Any, wanted: Any) -> bool:
    """Return whether a value differs, or a field of it that is wanted."""
    if isinstance(there, dict) and isinstance(wanted, dict):
        return any(_differs(there.get(key, ...), value) for key, value in wanted.items())
    return bool(there != wanted)


def set_aside(folder: Path, say: Say) -> Path:
    """Rename a folder of an earlier run, so that nothing is lost; return its new name."""
    number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.{n}").exists())
    aside = folder.with_name(f"{folder.name}.{number}")
    shutil.move(folder, aside)
    say(f"{folder} moved to {aside}")
    return aside


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty, which differs from any other, if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
