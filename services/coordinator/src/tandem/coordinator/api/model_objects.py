"""A model and a tokenizer that a program has in memory, saved as a folder of the run.

The folder is named after the content of its files. Resuming the run with another model is thus noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError, ModelError
from tandem.common.returned import shown
from tandem.samples.unchanged_files import use_older_names

FOLDER = "models"
"""Folder of the models within the run folder."""
_CHUNK = 1 << 24


class SavedObjects(msgspec.Struct, frozen=True):
    """Model and tokenizer files beside the run folder, to be moved into it."""

    temporary: Path
    folder: Path
    """Final folder of the files."""
    settings: dict[str, Any]
    """Configuration that names the final folder."""

    def keep(self) -> None:
        """Move the files into the run folder, unless they are already there."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if not self.folder.exists():
            self.temporary.rename(self.folder)


def check_objects(model: object, tokenizer: object) -> None:
    """Raise `ConfigError` for arguments that Transformers cannot save as a model or a tokenizer."""
    for value, argument, kind in (
        (model, "model", "transformers.PreTrainedModel"),
        (tokenizer, "tokenizer", "transformers.PreTrainedTokenizerBase"),
    ):
        if value is not None and not any(base.__name__ == kind.rpartition(".")[2] for base in type(value).__mro__):
            raise ConfigError(
                f"{argument}: expected a {kind}, got {shown(value)[:200]}; the name of a folder, or of a model on the "
                "Hub, is policy.model_name of the configuration"
            )


def make_placeholders(model: object, tokenizer: object) -> dict[str, Any]:
    """Return the configuration with placeholders for the saved objects, to find out where the run folder is."""
    return _settings(model, tokenizer, "-")


@contextlib.contextmanager
def save_objects(model: Any, tokenizer: Any, run_folder: Path) -> Iterator[SavedObjects | None]:
    """Save a model, a tokenizer or both beside the run folder; files that are not kept are deleted at the end."""
    if model is None and tokenizer is None:
        yield None
        return
    run_folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run_folder.parent, prefix=".model-") as beside:
        files = Path(beside) / "files"
        for value, argument in ((model, "model"), (tokenizer, "tokenizer")):
            try:
                if value is not None:
                    value.save_pretrained(files)
                    use_older_names(files)
            except Exception as error:
                raise ModelError(f"{argument}: cannot be saved: {type(error).__name__}: {error}") from error
        folder = run_folder / FOLDER / f"policy-{_digest(files)}"
        yield SavedObjects(temporary=files, folder=folder, settings=_settings(model, tokenizer, str(folder)))


def _settings(model: object, tokenizer: object, folder: str) -> dict[str, Any]:
    policy: dict[str, Any] = {}
    if model is not None:
        policy |= {"model_name": folder, "new_model": None}
    if tokenizer is not None:
        policy |= {"tokenizer": {"name": folder}}
    return {"policy": policy} if policy else {}


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:12]
