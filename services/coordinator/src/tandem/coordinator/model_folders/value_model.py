"""A run's value model: the check of its folder before the run starts.

The policy's folder has a check of its own, and one that the run before it makes does not exist yet. Tensors are not
compared with ``config.json``: the model may begin as a language model or as a classifier, and some are not read.
"""

from __future__ import annotations

from pathlib import Path

from tandem.common.errors import DamagedCheckpoint, ModelError
from tandem.config import Config
from tandem.coordinator.model_folders.checking import read_json, refuse_unknown_type
from tandem.samples import manifest


def check_value_model(config: Config) -> None:
    """Check the value model, if the run has one. Raise `ModelError` if it cannot be used."""
    if config.value is None or "value" not in config.holds:
        return
    folder = Path(config.value.model_name)
    if config.value.model_name == config.policy.model_name or not folder.exists():
        return
    if not (folder / "config.json").exists():
        raise ModelError(f"value.model_name: {str(folder)!r} holds no config.json, so it is not a model")
    try:
        if (written := manifest.of_model(folder)) is not None:
            manifest.check_files(written[0], written[1].files)
        refuse_unknown_type(folder, read_json(folder / "config.json"))
    except (ModelError, DamagedCheckpoint) as error:
        raise ModelError(f"value.model_name: {error}") from error
