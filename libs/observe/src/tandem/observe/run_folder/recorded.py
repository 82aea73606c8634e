"""A run's configuration and checkpoints, read from its folder, and steps in words."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.errors import ConfigError, ModelError, RunFolderError
from tandem.config import Config, config_from_json
from tandem.observe.run_folder.checkpoints import CheckpointFolder
from tandem.observe.run_folder.journal import JournalReader
from tandem.observe.run_folder.journal_errors import JOURNAL_NAME

if TYPE_CHECKING:
    from tandem.samples.tokenizer import Tokenizer


def config_of(journal: JournalReader) -> Config:
    """Return the configuration of a run. Raises `RunFolderError` if this release does not know it."""
    try:
        return config_from_json(journal.config_json)
    except ConfigError as error:
        raise RunFolderError(f"{journal.folder / JOURNAL_NAME}: another release wrote it: {error}") from error


def checkpoints_of(run: Path, config: Config) -> CheckpointFolder:
    """Return the checkpoints of the run in a folder; both may have been moved together."""
    root, log_dir = Path(config.checkpointing.checkpoint_dir), Path(config.logger.log_dir)
    if root.is_relative_to(log_dir):
        root = run / root.relative_to(log_dir)
    return CheckpointFolder(root, keep_top_k=None, higher_is_better=True)


def tokenizer_of(run: Path, config: Config) -> Tokenizer | None:
    """Return the tokenizer of a run, or its copy in a checkpoint; None if neither is on this machine."""
    from tandem.samples.model_files import load_tokenizer

    checkpoints = checkpoints_of(run, config)
    folders = [checkpoints.folder_of(step) / "policy" for step in reversed(checkpoints.steps())]
    for folder in [Path(config.policy.tokenizer.name), *folders]:
        if (folder / "tokenizer.json").is_file():
            try:
                return load_tokenizer(config, folder)
            except ModelError as error:
                print(f"note: {error}", file=sys.stderr)
    return None


def steps_in_words(steps: Iterable[int]) -> str:
    """Name steps on one line: ``step 3``, or ``steps 1 to 4, 7``."""
    numbers = sorted(steps)
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    parts: list[str] = []
    for _, run in runs:
        places = [number for _, number in run]
        parts += [f"{places[0]} to {places[-1]}"] if len(places) > 2 else map(str, places)
    return f"step{'s' * (len(numbers) > 1)} {', '.join(parts)}"
