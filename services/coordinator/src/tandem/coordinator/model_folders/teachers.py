"""A run's teachers: the checks of their folders and tokenizers before it starts.

Teachers that the run before it makes are checked when they are made.
"""

from __future__ import annotations

from pathlib import Path

from tandem.common.errors import DamagedCheckpoint, ModelError
from tandem.config import Config
from tandem.coordinator.model_folders.checking import check_weights
from tandem.samples.model_files import load_model_tokenizer
from tandem.samples.tokenizer import Tokenizer


def check_teachers(config: Config, tokenizer: Tokenizer, *, may_be_made: bool) -> list[str]:
    """Check the teachers, and compare their tokens with the policy's; return notices.

    `may_be_made`: whether another run will make missing ones. Raise `ModelError` if one cannot be used.
    """
    notices = []
    for key, teacher in config.teacher_sections.items():
        folder = Path(teacher.model_name)
        if not folder.exists() and may_be_made:
            continue
        if not (folder / "config.json").exists():
            defect = "holds no config.json, so it is not a model" if folder.exists() else "does not exist"
            raise ModelError(f"{key}: {str(folder)!r} {defect}")
        try:
            notices += [f"{key}: {notice}" for notice in check_weights(folder)]
        except (ModelError, DamagedCheckpoint) as error:
            raise ModelError(f"{key}: {error}") from error
        teacher_tokenizer = load_model_tokenizer(Path(teacher.tokenizer.name) if teacher.tokenizer.name else folder)
        if (difference := tokenizer.difference(teacher_tokenizer)) is not None:
            raise ModelError(f"{key}: {difference}: distillation needs a teacher with the policy's tokenizer")
    return notices
