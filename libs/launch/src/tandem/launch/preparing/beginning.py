"""How a run begins in its run folder: anew, from what is there, or with that set aside."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from tandem.config import Config
from tandem.observe.run_folder.journal_file import JOURNAL_NAME

Mode = Literal["new", "resume", "restart"]
Say = Callable[[str], None]


def has_begun(config: Config) -> bool:
    """Return whether there is a run in the run folder."""
    return (Path(config.logger.log_dir) / JOURNAL_NAME).exists()


def set_aside(folder: Path, say: Say) -> Path:
    """Rename a folder of an earlier run, so that nothing is lost; return its new name."""
    number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.{n}").exists())
    aside = folder.with_name(f"{folder.name}.{number}")
    shutil.move(folder, aside)
    say(f"{folder} moved to {aside}")
    return aside
