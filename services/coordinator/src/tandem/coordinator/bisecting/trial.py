"""A trial: a replay, or a short run of its own, with one thing changed. A process of its own.

``python -m tandem.coordinator.bisecting.trial ORDER PARENT``: it ends with its parent, however that ends.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from tandem.common import gc_tuning
from tandem.common.errors import BAD_INPUT, FAILED, ConfigError, TandemError
from tandem.common.process_lifetime import die_with
from tandem.config import Config, change_config
from tandem.coordinator.bisecting.trials import TrialOrder, TrialSpec
from tandem.coordinator.commands.running import run_without_report
from tandem.coordinator.preparing.replay import begin_replay, source_of
from tandem.observe.run_folder.checkpoints import checkpoints_of, config_of
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.journal_file import CONFIG_NAME


def main(words: list[str]) -> int:
    """Carry out the order in a file; return the exit code."""
    gc_tuning.retire_at_exit()
    path, parent = words
    die_with(int(parent))
    order = msgspec.json.decode(Path(path).read_bytes(), type=TrialOrder)
    run, folder = Path(order.run), Path(order.folder)
    try:
        configure = configure_replay if order.spec.kind == "replay" else configure_rerun
        finish = run_without_report(source_of(run), configure(run, folder, order.spec), "new", None)
    except ConfigError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems))
        return BAD_INPUT
    except (TandemError, OSError) as error:
        print(f"error: {error}")
        return FAILED
    if finish.error is not None:
        print(f"error: {finish.error}")
    return 0 if finish.outcome == "finished" else FAILED


def configure_replay(run: Path, folder: Path, spec: TrialSpec) -> Config:
    """Return the configuration of a replay. Raises `TandemError`."""
    settings = {**_quiet(folder), **spec.settings}
    del settings["eval.during_training"]  # a replay sets it
    overrides = [f"{key}={msgspec.json.encode(value).decode()}" for key, value in settings.items()]
    without = folder / "without.jsonl" if spec.edits else None
    return begin_replay(run, spec.from_step, spec.to_step, overrides, without).config


def configure_rerun(run: Path, folder: Path, spec: TrialSpec) -> Config:
    """Return the configuration of a short run from the model that the run began with, or from a checkpoint's.

    Raises:
        TandemError: it is impossible.

    """
    with read_journal(run) as journal:
        config = config_of(journal)
    settings: dict[str, Any] = {
        **_quiet(folder),
        "prerequisite": None,
        f"{config.algorithm}.max_num_steps": spec.to_step - spec.from_step,
        **spec.settings,
    }
    if spec.from_step:
        policy = checkpoints_of(run, config).folder_of(spec.from_step) / "policy"
        settings |= {"policy.model_name": str(policy.absolute()), "policy.new_model": None}
    return change_config(config, _nest(settings), (), str(run / CONFIG_NAME)).config


def _quiet(folder: Path) -> dict[str, Any]:
    """Return settings with which a run writes to its own folder alone, and saves nothing."""
    loggers = ("tensorboard", "wandb", "mlflow", "swanlab")
    return {
        "logger.log_dir": str(folder / "run"),
        **{f"logger.{name}_enabled": False for name in loggers},
        "logger.page": "off",
        "logger.prometheus.port": None,
        "logger.opentelemetry.endpoint": None,
        "checkpointing.enabled": False,
        "checkpointing.checkpoint_dir": str(folder / "run" / "checkpoints"),
        "eval.during_training": False,
    }


def _nest(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings by key as sections within sections."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return nested


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
