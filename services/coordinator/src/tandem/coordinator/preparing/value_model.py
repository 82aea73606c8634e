"""A run's value model: its folder is looked through before the run starts.

That of the policy is looked through as such, and one that the run before it makes is not there yet. Its tensors are not
compared with its ``config.json``: it may begin as a language model or as a classifier, and some of them are not read.
"""

from __future__ import annotations

from pathlib import Path

from tandem.common.errors import DamagedCheckpoint, ModelError
from tandem.config import Config
from tandem.coordinator.preparing.model_folder import read_json, refuse_unknown_type
from tandem.samples import manifest


def check_value_model(config: Config) -> None:
    """Look the value model through, if the run has one. Raises `ModelError`."""
    if config.value is None or "value" not in config.declaration.holds(config):
        return
    folder = Path(config.value.model_name)
    if config.value.model_name == config.policy.model_name or not folder.exists():
        return
    if not (folder / "config.json").exists():
        raise ModelError(f"value.model_name: {str(folder)!r} holds no config.json, so it is no model")
    try:
        if (written := manifest.of_model(folder)) is not None:
            manifest.check_files(written[0], written[1].files)
        refuse_unknown_type(folder, read_json(folder / "config.json"))
    except (ModelError, DamagedCheckpoint) as error:
        raise ModelError(f"value.model_name: {error}") from error
