"""Checks of models' folders before a run: what a policy, teacher, value or reward model must hold.

Headers of safetensors files tell names, shapes and types. Thus only a few kilobytes are read, and the output layer
where it should equal the embedding. The expected tensors are known for the architectures of
`tandem.refit.adapters.catalogue`; of others, only certain faults are reported. A folder that is the ``policy/`` of a
checkpoint is first compared with the checkpoint's manifest.

It reads ``config.json`` and the headers of the safetensors files.

The policy's folder has a check of its own, and one that the run before it makes does not exist yet. Tensors are not
compared with ``config.json``: the model may begin as a language model or as a classifier, and some are not read.

Teachers that the run before it makes are checked when they are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.common.errors import ConfigError, DamagedCheckpoint, DataError, ModelError, nearest
from tandem.config import Config
from tandem.config.installed.model_fields import list_model_types
from tandem.config.models import hub
from tandem.config.models.model_sizes import find_max_positions, local_folder
from tandem.config.schema import EnvironmentConfig
from tandem.refit.adapters import catalogue
from tandem.refit.adapters.catalogue import TensorPlace, make_shape
from tandem.refit.adapters.geometry import FAMILIES
from tandem.samples import manifest
from tandem.samples.chat_templates import memory_limit
from tandem.samples.model_files import load_model_tokenizer, load_reward_model_tokenizer
from tandem.samples.tokenizer import Tokenizer

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_INTEGERS = ("I", "U", "BOOL")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"
"""Buffer in old files that is never read."""
_FUSED = ".mlp.experts.gate_up_proj"
_SLAB_BYTES = 2**22
_CLASSIFIER = "ForSequenceClassification"
_CLASSIFIER_HEAD = re.compile(r"(score|classifier|classification_head)\.")
_DEFAULT_LABELS = 2
"""Default of Transformers, where ``config.json`` has none."""


def check_model(config: Config) -> list[str]:
    """Check the folder ``policy.model_name``, if it exists; return notices.

    Raises:
        ModelError: its weights do not fit its ``config.json``, or have changed since they were written.
        ConfigError: ``policy.generation.stop_token_ids`` has a token that the model lacks.
    """
    folder = Path(config.policy.model_name)
    if not (folder / "config.json").is_file():
        return []
    try:
        notices = check_weights(folder)
        model = read_json(folder / "config.json")
    except (ModelError, DamagedCheckpoint) as error:
        raise ModelError(f"policy.model_name: {error}") from error
    return [f"policy.model_name: {notice}" for notice in notices] + list(_end_tokens(config, folder, model))


def model_vocabulary(folder: Path) -> int | None:
    """Return the vocabulary size in a model's ``config.json``. Raise `ModelError` if the file cannot be read."""
    size = read_json(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None


def check_weights(folder: Path) -> list[str]:
    """Check a model's folder, which has a ``config.json``; return notices.

    Raises:
        ModelError: its weights do not fit its ``config.json``.
        DamagedCheckpoint: they have changed since they were written.
    """
    written = manifest.of_model(folder)
    if written is not None:
        manifest.check_files(written[0], written[1].files)
    model = read_json(folder / "config.json")
    refuse_unknown_type(folder, model)
    if any(folder.glob("*.safetensors")) and not hub.is_to_come(folder):
        return list(_tensors(model, catalogue.read_places(folder)))
    return []  # drawn by policy.new_model, in another format, or checked once fetched


def refuse_unknown_type(folder: Path, model: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a model of a type that Transformers does not know."""
    kind, types = model.get("model_type"), list_model_types()
    if types and kind not in types:
        raise ModelError(
            f"{folder}: transformers has no model type {kind!r} (config.json: model_type){nearest(str(kind), types)}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return one of a model's JSON files. Raise `ModelError` if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a model's configuration")
    return content


def _tensors(model: Mapping[str, Any], places: Mapping[str, TensorPlace]) -> Iterator[str]:
    """Yield notices about the tensors. Raise `ModelError` if they do not fit the configuration."""
    _refuse_layers_beyond(model, places)
    if model.get("quantization_config"):
        return  # quantisation decides which tensors there are
    for name, place in places.items():
        if place.dtype.startswith(_INTEGERS) and name.endswith((".weight", ".bias")):
            raise ModelError(
                f"{place.path}: {name} is of integers ({place.dtype}), and config.json names no quantisation"
            )
    _refuse_another_head(model, places)
    fuses_experts = model.get("model_type") != "gpt_oss" and any(_FUSED in name for name in places)
    if model.get("model_type") in FAMILIES and _EMBEDDING in places and not fuses_experts:
        yield from _against_catalogue(model, places)


def _against_catalogue(model: Mapping[str, Any], places: Mapping[str, TensorPlace]) -> Iterator[str]:
    expected = {tensor.name: tensor.shape for tensor in make_shape(model).tensors}
    somewhere = next(iter(places.values())).path.parent
    for name, shape in expected.items():
        if name not in places:
            raise ModelError(f"{somewhere}: {name} is missing, which config.json implies")
        if places[name].shape != shape:
            raise ModelError(f"{places[name].path}: {name} has shape {places[name].shape}, config.json implies {shape}")
    for name, place in places.items():
        if name in expected or name.endswith(_COMPUTED) or name == _HEAD:
            continue
        layer = _LAYER.match(name)
        if layer and int(layer[1]) < model["num_hidden_layers"]:
            raise ModelError(f"{place.path}: {name} is not a tensor of the model that config.json describes")
        yield f"{place.path}: {name} is not read: the model that config.json describes has no such tensor"


def _refuse_layers_beyond(model: Mapping[str, Any], places: Mapping[str, TensorPlace]) -> None:
    num_layers = model.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return
    predicted = model.get("num_nextn_predict_layers") or 0
    for name, place in places.items():
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= num_layers + predicted:
            raise ModelError(f"{place.path}: {name} is of a layer beyond the {num_layers} of config.json")


def _refuse_another_head(model: Mapping[str, Any], places: Mapping[str, TensorPlace]) -> None:
    """Raise `ModelError` if the output layer is not the embedding, though config.json ties the two."""
    if model.get("tie_word_embeddings") is not True or not {_EMBEDDING, _HEAD} <= places.keys():
        return
    embedding, head = places[_EMBEDDING], places[_HEAD]
    if embedding[1:3] != head[1:3] or not _equal(embedding, head):
        raise ModelError(f"{head.path}: {_HEAD} is not {_EMBEDDING}, though config.json says tie_word_embeddings: true")


def _equal(first_place: TensorPlace, second_place: TensorPlace) -> bool:
    """Return whether two tensors of one shape and type have the same bytes."""
    try:
        with first_place.path.open("rb") as first, second_place.path.open("rb") as second:
            first.seek(first_place.start)
            second.seek(second_place.start)
            bytes_left = first_place.num_bytes
            while bytes_left:
                count = min(bytes_left, _SLAB_BYTES)
                if first.read(count) != second.read(count):
                    return False
                bytes_left -= count
    except OSError as error:
        raise ModelError(f"{second_place.path} cannot be read: {error.strerror}") from error
    return True


def _end_tokens(config: Config, folder: Path, model: Mapping[str, Any]) -> Iterator[str]:
    """Yield notices about end tokens that the model lacks. Raise `ConfigError` for such a stop token."""
    size = model.get("vocab_size")
    if not isinstance(size, int):
        return
    for stop in config.policy.generation.stop_token_ids or ():
        if not 0 <= stop < size:
            raise ConfigError(
                f"policy.generation.stop_token_ids: {stop} is not a token of the model in {folder}, which has {size}"
            )
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        ends = read_json(path).get("eos_token_id")
        for token in ends if isinstance(ends, list) else [ends]:
            if isinstance(token, int) and not 0 <= token < size:
                yield f"{path}: eos_token_id {token} is not a token of the model, which has {size}"


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
    heads = [place for name, place in catalogue.read_places(folder).items() if _CLASSIFIER_HEAD.match(name)]
    if not heads:
        raise ModelError(f"{prefix} has no weights for the head of a classifier, such as score.weight")
