"""The files of a policy: its tokenizer, read from a folder, and what a new model begins with."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError, ModelError, TandemError, nearest
from tandem.common.files import first_irregular, read_text
from tandem.config import Config
from tandem.config.installed.model_fields import list_model_types
from tandem.config.models.model_sizes import local_folder, read_json
from tandem.config.models.vision_families import find_vision_family
from tandem.config.schema import EnvironmentConfig, NewModel
from tandem.config.schema import TokenizerConfig as Settings
from tandem.samples.tokenizer import KEY, Tokenizer
from tandem.samples.unchanged_files import save_tokenizer

_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""A minimal template: the user's text follows the beginning-of-sequence token, and the answer follows the text, so
that a small model has nothing else to learn."""


def load_tokenizer(config: Config, folder: Path | None = None) -> Tokenizer:
    """Load ``policy.tokenizer``, from another `folder` if its own does not exist yet.

    Raises `ModelError` if there is no tokenizer, and `ConfigError` for a variable that its chat template does not
    read.
    """
    tokenizer = load_configured_tokenizer(KEY, config.policy.tokenizer, folder)
    source = config.policy.tokenizer.name
    model = local_folder(config.policy.model_name) or Path(config.policy.model_name)
    tokenizer.model_folders = tuple(dict.fromkeys((*tokenizer.model_folders, model)))
    return wrap_for_media(tokenizer, folder or local_folder(source) or Path(source))


def wrap_for_media(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Return the tokenizer of the model in a folder: the one given, unless the model sees."""
    if find_vision_family(read_json(folder / "config.json")) is None:
        return tokenizer
    from tandem.samples.images.chat import VisionTokenizer

    return VisionTokenizer(tokenizer, folder)


def write_new_model(folder: Path, new_model: NewModel) -> None:
    """Write ``config.json`` and a character-level tokenizer to `folder`, atomically; the weights come later.

    Every character of ``new_model.characters`` is one token, beside padding, beginning and end of sequence. The same
    arguments write the same bytes. Raises `ConfigError` if Transformers does not know the model type, and
    `ModelError` if the folder cannot be written.
    """
    characters = sorted(set(new_model.characters))
    family = find_vision_family(new_model.config)
    special = () if family is None else family.special_tokens
    vocabulary = {token: index for index, token in enumerate([_PAD, _BOS, _EOS, *special, *characters])}
    # A unique name, since another killed attempt, here or on another host, may have left its folder behind.
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        if family is None:
            _write_config(temporary, new_model.config, len(vocabulary))
            _write_tokenizer(temporary, vocabulary, _CHAT_TEMPLATE)
        else:
            from tandem.samples.images.families import chat_template, config_of, write_image_processor

            _write_config(temporary, config_of(family, new_model.config, vocabulary), len(vocabulary))
            _write_tokenizer(temporary, vocabulary, chat_template(family), special)
            write_image_processor(temporary, family, new_model.image_processor)
        temporary.rename(folder)
    except TandemError:
        raise
    except Exception as error:  # tokenizers raises a bare `Exception` on a full disk
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise ModelError(f"policy.model_name: cannot write a new model to {str(folder)!r}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # the folder is not empty: it holds the model, for example
                parent.rmdir()


def check_new_model_type(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if Transformers does not know the type of a new model with these settings."""
    model_type = settings.get("model_type")
    if model_type not in list_model_types():
        hint = nearest(str(model_type), list_model_types())
        raise ConfigError(f"policy.new_model.config.model_type: transformers has no model type {model_type!r}{hint}")


def _write_config(folder: Path, settings: Mapping[str, Any], vocab_size: int) -> None:
    # Importing AutoConfig would import torch. The trainer has torch; it makes the model and finds other errors.
    check_new_model_type(settings)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(dict(settings) | {"vocab_size": vocab_size} | ids, indent=2) + "\n")


def _write_tokenizer(
    folder: Path, vocabulary: Mapping[str, int], chat_template: str, special: Sequence[str] = ()
) -> None:
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    # A character outside the vocabulary becomes padding, which `Tokenizer.encode` notices.
    fast = Fast(models.WordLevel(vocab=dict(vocabulary), unk_token=_PAD))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    fast.decoder = decoders.Fuse()
    # A plain text begins like a conversation, since the model has seen nothing else.
    fast.post_processor = processors.TemplateProcessing(single=f"{_BOS} $A", special_tokens=[(_BOS, vocabulary[_BOS])])
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token=_PAD, bos_token=_BOS, eos_token=_EOS, extra_special_tokens=[*special]
    )
    wrapped.chat_template = chat_template
    save_tokenizer(wrapped, folder)


def load_configured_tokenizer(key: str, settings: Settings, folder: Path | None = None) -> Tokenizer:
    """Load the tokenizer described by a section at `key`, from another `folder` if its own does not exist yet.

    Raises `ModelError` if there is no tokenizer, and `ConfigError` for a variable that its chat template does not
    read.
    """
    source = settings.name
    try:
        hugging_face = _read_tokenizer(folder or Path(source), source)
    except ModelError as error:
        raise ModelError(f"{key}.name: {error}") from error
    template = _configured_template(f"{key}.chat_template", settings.chat_template)
    if template is not None:
        hugging_face.chat_template = template
    variables = settings.chat_template_kwargs or {}
    tokenizer = Tokenizer(hugging_face, source, variables, key)
    tokenizer.model_folders = (folder or local_folder(source) or Path(source),)
    for name in variables:
        known_variables = tokenizer.template_variables
        if name not in known_variables:
            hint = nearest(name, sorted(known_variables))
            raise ConfigError(
                f"{key}.chat_template_kwargs.{name}: the chat template of {source} reads no such variable{hint}"
            )
    return tokenizer


def _configured_template(key: str, value: str | None) -> str | None:
    """Return the template that replaces the tokenizer's own; None if none does.

    As in NeMo-RL, a value that ends in ``.jinja`` is a file. Raises `ConfigError` if it cannot be read, and for a text
    without anything to fill in: every prompt would be that text.
    """
    if value is None or value.lower() == "default":
        return None
    is_file = value.endswith(".jinja")
    template = read_text(key, value) if is_file else value
    if "{" not in template:
        hint = "" if is_file else "; the name of a file with one ends in .jinja"
        raise ConfigError(f"{key}: {value!r} is no Jinja template: it writes no message{hint}")
    return template


def inline_templates(config: Config) -> Config:
    """Return a configuration with the texts of chat templates in the place of their files.

    Processes on other hosts need not see the files, and a resumed run notices that one has changed. Raises
    `ConfigError` for a file that cannot be read.
    """

    def fill(key: str, tokenizer: Settings) -> Settings:
        template = _configured_template(f"{key}.chat_template", tokenizer.chat_template)
        return tokenizer if template is None else msgspec.structs.replace(tokenizer, chat_template=template)

    policy = msgspec.structs.replace(config.policy, tokenizer=fill(KEY, config.policy.tokenizer))
    env = {
        name: entry
        if entry.tokenizer is None
        else msgspec.structs.replace(entry, tokenizer=fill(f"env.{name}.tokenizer", entry.tokenizer))
        for name, entry in config.env.items()
    }
    return msgspec.structs.replace(config, policy=policy, env=env)


def load_reward_model_tokenizer(key: str, settings: EnvironmentConfig) -> Tokenizer:
    """Load the tokenizer of a reward model, configured at `key`. Raises `ModelError`, or `ConfigError` for its
    template.

    A chat template is required, since nothing else would separate the response from the prompt.
    """
    name = str(settings.model_name)
    described = settings.tokenizer or Settings(name=name)
    tokenizer = load_configured_tokenizer(f"{key}.tokenizer", described, local_folder(described.name))
    if not tokenizer.has_chat_template:
        raise ConfigError(
            f"{key}.tokenizer: the tokenizer of {described.name!r} has no chat template; set chat_template"
        )
    return tokenizer


def load_model_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer beside a model's weights. Raises `ModelError` if there is none."""
    return Tokenizer(_read_tokenizer(folder, str(folder)), str(folder))


def _read_tokenizer(folder: Path, source: str) -> Any:
    # AutoTokenizer would import torch; every tokenizer that Tandem supports has the one file that this class reads.
    from transformers import PreTrainedTokenizerFast

    failure = f"cannot load a tokenizer from {source!r}: "
    files = itertools.chain([folder], folder.glob("*"), folder.glob("additional_chat_templates/*"))
    strange = first_irregular(files)
    if strange is not None:
        raise ModelError(f"{failure}{strange}, not a file")
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:  # the library raises whatever its readers raise
        raise ModelError(f"{failure}{error}".split("\n")[0]) from error
