"""The check, before anything starts, that a reward model's folder holds a classifier with one label.

It reads ``config.json`` and the headers of the safetensors files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.common.errors import ConfigError, DamagedCheckpoint, DataError, ModelError
from tandem.config import Config
from tandem.config.models import hub
from tandem.config.models.model_sizes import find_max_positions, local_folder
from tandem.config.schema import EnvironmentConfig
from tandem.coordinator.model_folders.checking import read_json, refuse_unknown_type
from tandem.refit.adapters import catalogue
from tandem.samples import manifest
from tandem.samples.chat_templates import memory_limit
from tandem.samples.model_files import load_reward_model_tokenizer

_CLASSIFIER = "ForSequenceClassification"
_HEAD = re.compile(r"(score|classifier|classification_head)\.")
_DEFAULT_LABELS = 2
"""Default of Transformers, where ``config.json`` has none."""


def check_reward_models(config: Config, made_in: Path | None = None) -> None:
    """Check the folders of the run's reward models; those that will be in `made_in` may still be missing.

    Raises:
        ModelError: there is no model, or its files have changed since they were written.
        ConfigError: it is not a sequence classifier with one label, or its chat template cannot write a conversation.
    """
    for name, entry in config.reward_models.items():
        folder = local_folder(str(entry.model_name))
        if folder is not None:
            _check(f"env.{name}", entry, folder)
        elif made_in is None or not Path(str(entry.model_name)).absolute().is_relative_to(made_in.absolute()):
            hint = "" if made_in is None else f", and the prerequisite makes what is in {str(made_in)!r}"
            raise ModelError(f"env.{name}.model_name: {entry.model_name!r} does not exist{hint}")


def _check(key: str, entry: EnvironmentConfig, folder: Path) -> None:
    prefix = f"{key}.model_name: {str(entry.model_name)!r}"
    if not (folder / "config.json").is_file():
        raise ModelError(f"{prefix} holds no config.json, so it is not a model")
    try:
        model = read_json(folder / "config.json")
        refuse_unknown_type(folder, model)
        _check_config(prefix, model)
        written = manifest.of_model(folder)
        if written is not None:
            manifest.check_files(written[0], written[1].files)
        _check_head(prefix, folder)
    except (ModelError, DamagedCheckpoint) as error:
        raise ModelError(str(error) if str(error).startswith(key) else f"{key}.model_name: {error}") from error
    positions = find_max_positions(model)
    if entry.max_model_len is not None and positions is not None and entry.max_model_len > positions:
        raise ConfigError(
            f"{key}.max_model_len: {entry.max_model_len} is more than the {positions} positions of the model"
        )
    tokenizer = load_reward_model_tokenizer(key, entry)
    conversation = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
    try:
        with memory_limit():
            tokenizer.encode_conversation(conversation)
    except DataError:
        pass  # a vocabulary without a 1


def _check_config(prefix: str, model: Mapping[str, Any]) -> None:
    architectures = model.get("architectures") or []
    if not any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in architectures):
        architecture = ", ".join(map(str, architectures)) or "nothing that config.json names"
        raise ConfigError(f"{prefix} is {architecture}, not a sequence classifier (...{_CLASSIFIER})")
    labels = model.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else model.get("num_labels", _DEFAULT_LABELS)
    if num_labels != 1:
        raise ConfigError(f"{prefix} has {num_labels} labels, must have one: a reward is one number")


def _check_head(prefix: str, folder: Path) -> None:
    if hub.is_to_come(folder):
        return  # checked once it is fetched
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{prefix} holds no *.safetensors, and weights in other formats are not read")
    heads = [place for name, place in catalogue.read_places(folder).items() if _HEAD.match(name)]
    if not heads:
        raise ModelError(f"{prefix} has no weights for the head of a classifier, such as score.weight")
