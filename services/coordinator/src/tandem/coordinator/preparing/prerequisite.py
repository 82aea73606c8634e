"""Make what a run begins from: a model from scratch, or the prerequisite run that makes one."""

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
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.journal_file import JOURNAL_NAME
from tandem.samples.tokenizer import write_new_model

Mode = Literal["new", "resume", "restart"]
Say = Callable[[str], None]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that was looked through (see `tandem.coordinator.preparing.preflight`)."""

    config: Config
    source: str
    """Its file."""
    algorithm: RunningAlgorithm
    notices: tuple[str, ...]
    """What there is to say of its model and its data."""
    prerequisite: Ready | None
    """The run that comes before, unless what it makes is there and it has never begun here."""


def has_begun(config: Config) -> bool:
    """Say whether there is a run in the run folder."""
    return (Path(config.logger.log_dir) / JOURNAL_NAME).exists()


def is_done(ready: Ready) -> bool:
    """Say whether the run in the run folder has come to its last step."""
    if not has_begun(ready.config):
        return False
    with read_journal(Path(ready.config.logger.log_dir)) as journal:
        return (journal.last_step() or 0) >= ready.algorithm.num_steps


def how_to_begin(ready: Ready, restarts: bool, say: Say) -> Mode | None:
    """Say how a prerequisite is to be run; None if it is not, because it is done.

    One whose configuration is not that of its run any more is made again if all is to begin anew (`restarts`), and
    otherwise kept as it is, if it has ended.
    """
    config, name = ready.config, f"prerequisite {ready.source}"
    if not has_begun(config):
        return "new"
    folder = Path(config.logger.log_dir)
    with read_journal(folder) as journal:
        last = journal.last_step() or 0
    changed = differences(ready)
    if changed and restarts:
        say(f"{name}: made again, because it differs from the run in {folder} in {changed}")
        return "restart"
    if last < ready.algorithm.num_steps:
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
    """Name what a configuration says otherwise than its run in the run folder; empty if nothing, or there is none."""
    if not has_begun(ready.config):
        return ""
    with read_journal(Path(ready.config.logger.log_dir)) as journal:
        recorded = journal.config_json
    try:
        return ", ".join(resume_differences(config_from_json(recorded), ready.config))
    except ConfigError:
        return "keys that another release wrote"


def model_problem(config: Config) -> str | None:
    """Say what is wrong with the folder of the model, None if it is there or to be made from scratch."""
    folder = Path(config.policy.model_name)
    if folder.exists():
        if (why := why_no_model(folder)) is not None:
            return f"policy.model_name: {why}"
        if not (folder / "config.json").exists():
            return f"policy.model_name: {str(folder)!r} holds no config.json, so it is no model"
    elif config.policy.new_model is None:
        return (
            f"policy.model_name: {str(folder)!r} does not exist, and neither policy.new_model nor prerequisite makes it"
        )
    return None


def make_model(config: Config, mode: Mode, say: Say) -> None:
    """Write the folder of a model that is made from scratch; check that any other local model is there.

    A folder that ``policy.new_model`` describes otherwise is kept, or set aside if the run begins anew.
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
    """Name what ``policy.new_model`` says otherwise than the folder that is there; empty if that is nothing."""
    new, folder = config.policy.new_model, Path(config.policy.model_name)
    if new is None or not folder.exists():
        return ""
    there = _read(folder / "config.json")
    differing = [f"config.{key}" for key, value in new.config.items() if there.get(key, ...) != value]
    vocabulary = _read(folder / "tokenizer.json").get("model", {}).get("vocab", {})
    if {token for token in vocabulary if len(token) == 1} != set(new.characters):
        differing.append("characters")
    return ", ".join(differing)


def set_aside(folder: Path, say: Say) -> Path:
    """Rename a folder of an earlier run: nothing is lost; return what it is called now."""
    number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.{n}").exists())
    aside = folder.with_name(f"{folder.name}.{number}")
    shutil.move(folder, aside)
    say(f"{folder} moved to {aside}")
    return aside


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; nothing of one that cannot be read, which differs from anything."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
