"""Tokenizers: text to tokens and back, and the character-level one of a model made from scratch.

transformers is imported where it is needed and no earlier: it takes half a second, and ``--help`` does not need it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.common.errors import ConfigError, DataError, ModelError, TandemError, nearest
from tandem.common.regular_files import first_irregular
from tandem.config import Config
from tandem.config.installed.model_fields import model_types
from tandem.config.models.model_sizes import local_folder
from tandem.config.schema import Environment, NewModel
from tandem.config.schema import Tokenizer as Settings
from tandem.samples.chat_templates import ChatTemplate, Messages

__all__ = ["Messages", "Tokenizer", "check_new_model_type", "load_tokenizer", "write_new_model"]

_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""What the user says follows the beginning-of-sequence token, and the answer follows that: there is nothing else to
learn for a small model."""

_KEY = "policy.tokenizer"
_TURN = "what the assistant said"
"""Stands for a turn of the assistant, whose tokens are known and whose text does not matter."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte in the vocabulary of a tokenizer whose other tokens are texts."""


class Tokenizer:
    """A Hugging Face tokenizer, reduced to what Tandem asks of it."""

    def __init__(
        self, hugging_face: Any, where: str, variables: Mapping[str, Any] | None = None, key: str = _KEY
    ) -> None:
        """`variables` are those of the chat template, unless who renders says otherwise; `key` is where it is set."""
        self._hugging_face = hugging_face
        self._variables = dict(variables or {})
        self.where = where
        """The folder that it comes from."""
        self._template = ChatTemplate(hugging_face, where, key)
        self._alphabet = _alphabet(hugging_face)
        self._spells_bytes = '"ByteLevel"' in json.dumps(_decoder(hugging_face))
        added = hugging_face.added_tokens_decoder
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def hugging_face(self) -> Any:
        """The tokenizer of Transformers behind it, for libraries that take one."""
        return self._hugging_face

    @property
    def eos_id(self) -> int:
        """The token that ends a response. Raises `ModelError` if the tokenizer has none."""
        eos_id = self._hugging_face.eos_token_id
        if eos_id is None:
            raise ModelError(f"the tokenizer in {self.where} has no end-of-sequence token")
        return int(eos_id)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a sequence, if there is one."""
        bos_id = self._hugging_face.bos_token_id
        return None if bos_id is None else int(bos_id)

    def difference(self, other: Tokenizer) -> str | None:
        """Say which token is not the same in another tokenizer; None if all are."""
        own, others = self._hugging_face.get_vocab(), other._hugging_face.get_vocab()
        token = next((token for token in sorted({*own, *others}) if own.get(token) != others.get(token)), None)
        if token is None:
            return None
        here, there = (vocabulary.get(token, "none") for vocabulary in (own, others))
        return f"token {token!r} is {here} in {self.where} and {there} in {other.where}"

    @property
    def pad_id(self) -> int:
        """The token of padding, or what stands for it where there is none: the one that ends a response.

        Raises `ModelError` if the tokenizer has neither.
        """
        pad_id = self._hugging_face.pad_token_id
        return self.eos_id if pad_id is None else int(pad_id)

    @property
    def has_chat_template(self) -> bool:
        """Whether a conversation has a form of its own; without one it is the plain text of its messages."""
        return self._hugging_face.chat_template is not None

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template can tell the model of tools."""
        return self.has_chat_template and "tools" in self._template.words

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of variables that a conversation may set for the chat template."""
        return self._template.variables if self.has_chat_template else frozenset()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text, by the chat template, which can read more `variables`.

        Raises `ConfigError` if the template is broken, refuses the conversation, or does not come to an end.
        """
        if not self.has_chat_template:
            return "".join(message["content"] for message in messages)
        given = self._variables | dict(variables or {})
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=given)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation. Raises what `render_chat` and `encode` raise."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables))

    def encode_continuation(
        self, messages: Sequence[Mapping[str, Any]], last_id: int, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the tokens between the end of an assistant's turn, `last_id`, and the beginning of its next one.

        `messages` are what others say in between. They are rendered by the chat template behind a turn of the
        assistant, and only what the template writes after that turn's content is tokenised: what went before stays as
        it is, to the token. If the turn ended with the token that the template ends it with, that is not repeated.
        Raises what `render_chat` and `encode` raise.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        rendered = self.render_chat([*before, *messages], add_generation_prompt=True, variables=variables)
        _, turn, rest = rendered.partition(_TURN)
        if not turn:
            raise ConfigError(f"policy.tokenizer.chat_template: the chat template of {self.where} drops earlier turns")
        if last_id in self._special_ids:  # an ordinary token only happens to look like what follows
            rest = rest.removeprefix(self.decode([last_id], skip_special_tokens=False))
        return self.encode(rest)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text, and none beside them unless the tokenizer is to put its own around it.

        Raises `DataError` for characters the tokenizer does not know.
        """
        unknown = self.unknown_characters(text)
        if unknown:
            what = "character" if len(unknown) == 1 else "characters"
            raise DataError(f"the tokenizer in {self.where} does not know the {what} {unknown!r}")
        return [int(token) for token in self._hugging_face(text, add_special_tokens=add_special_tokens)["input_ids"]]

    @property
    def knows_every_character(self) -> bool:
        """Whether there is nothing that `unknown_characters` could find."""
        return self._alphabet is None

    def unknown_characters(self, text: str) -> str:
        """Return the characters of a text for which there is no token, each once, in their order."""
        if self._alphabet is None or self._alphabet.issuperset(text):
            return ""
        return "".join(dict.fromkeys(c for c in self._without_special(text) if c not in self._alphabet))

    def special_ids(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the special tokens that spell one of these texts."""
        return frozenset(i for i in self._special_ids if self._hugging_face.convert_ids_to_tokens(i) in texts)

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> str:
        """Return the text of tokens; special ones that are `kept` are not skipped."""
        if kept and skip_special_tokens:
            tokens = [token for token in tokens if token in kept or token not in self._special_ids]
            skip_special_tokens = False
        return str(
            self._hugging_face.decode(
                list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token spells, which may be a part of a character; nothing for an id that is no token."""
        piece = self._hugging_face.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id not in self._special_ids:
            if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
                return bytes([int(byte[1], 16)])
            if self._spells_bytes and _BYTE_OF.keys() >= set(piece):
                return bytes(_BYTE_OF[character] for character in piece)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def _without_special(self, text: str) -> str:
        for token in self._hugging_face.all_special_tokens:
            text = text.replace(token, "")
        return text

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files beside a model's weights."""
        self._hugging_face.save_pretrained(folder)


def _decoder(hugging_face: Any) -> Any:
    """Return how a tokenizer makes text of its tokens, as its file describes it; null if it does no more than join."""
    decoder = hugging_face.backend_tokenizer.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _byte_characters() -> dict[str, int]:
    """Return the characters that stand for bytes in the vocabularies of byte-level tokenizers (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _alphabet(hugging_face: Any) -> frozenset[str] | None:
    """Return the characters of a character-level tokenizer; None for any other, which can represent every text."""
    from tokenizers.models import WordLevel

    if not isinstance(hugging_face.backend_tokenizer.model, WordLevel):
        return None
    special = set(hugging_face.all_special_tokens)
    ordinary = frozenset(token for token in hugging_face.get_vocab() if token not in special)
    return ordinary if all(len(token) == 1 for token in ordinary) else None


def load_tokenizer(config: Config, folder: Path | None = None) -> Tokenizer:
    """Load ``policy.tokenizer``, from another `folder` where it is not there yet.

    Raises `ModelError` if none is, and `ConfigError` if its chat template is given what it does not read.
    """
    return load_configured_tokenizer(_KEY, config.policy.tokenizer, folder)


def load_configured_tokenizer(key: str, settings: Settings, folder: Path | None = None) -> Tokenizer:
    """Load the tokenizer that a section, at `key`, describes, from another `folder` where it is not there yet.

    Raises `ModelError` if none is, and `ConfigError` if its chat template is given what it does not read.
    """
    where = settings.name
    try:
        hugging_face = _read_tokenizer(folder or Path(where), where)
    except ModelError as error:
        raise ModelError(f"{key}.name: {error}") from error
    if settings.chat_template not in (None, "default"):
        hugging_face.chat_template = settings.chat_template
    variables = settings.chat_template_kwargs or {}
    tokenizer = Tokenizer(hugging_face, where, variables, key)
    for name in variables:
        known = tokenizer.template_variables
        if name not in known:
            hint = nearest(name, sorted(known))
            raise ConfigError(
                f"{key}.chat_template_kwargs.{name}: the chat template of {where} reads no such variable{hint}"
            )
    return tokenizer


def load_reward_model_tokenizer(key: str, settings: Environment) -> Tokenizer:
    """Load the tokenizer of a reward model, configured at `key`. Raises `ModelError`, and `ConfigError` for a template.

    Without a chat template, there would be nothing to tell the response from the prompt.
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
    """Load the tokenizer that lies beside a model's weights. Raises `ModelError` if there is none."""
    return Tokenizer(_read_tokenizer(folder, str(folder)), str(folder))


def _read_tokenizer(folder: Path, where: str) -> Any:
    # AutoTokenizer would import torch; every tokenizer that Tandem can use has the one file that this class reads.
    from transformers import PreTrainedTokenizerFast

    failure = f"cannot load a tokenizer from {where!r}: "
    files = itertools.chain([folder], folder.glob("*"), folder.glob("additional_chat_templates/*"))
    strange = first_irregular(files)
    if strange is not None:
        raise ModelError(f"{failure}{strange}, not a file")
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:  # the library raises whatever its readers raise
        raise ModelError(f"{failure}{error}".split("\n")[0]) from error


def write_new_model(folder: Path, new_model: NewModel) -> None:
    """Write ``config.json`` and a character-level tokenizer to `folder`, whole or not at all; the weights come later.

    Every character of ``new_model.characters`` is one token, beside padding, beginning and end of sequence. The same
    arguments write the same bytes. Raises `ConfigError` if transformers does not know the model type, and `ModelError`
    if the folder cannot be written.
    """
    characters = sorted(set(new_model.characters))
    vocabulary = {token: index for index, token in enumerate([_PAD, _BOS, _EOS, *characters])}
    # A name of its own: another attempt, here or on another host, may have left its folder behind when it was killed.
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        _write_config(temporary, new_model.config, len(vocabulary))
        _write_tokenizer(temporary, vocabulary)
        temporary.rename(folder)
    except TandemError:
        raise
    except Exception as error:  # tokenizers raises bare `Exception` on a full disk
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise ModelError(f"policy.model_name: cannot write a new model to {str(folder)!r}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # it holds something, the model to begin with
                parent.rmdir()


def check_new_model_type(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if transformers does not know the type of a new model with these settings."""
    model_type = settings.get("model_type")
    if model_type not in model_types():
        hint = nearest(str(model_type), model_types())
        raise ConfigError(f"policy.new_model.config.model_type: transformers has no model type {model_type!r}{hint}")


def _write_config(folder: Path, settings: Mapping[str, Any], vocab_size: int) -> None:
    # Importing AutoConfig would import torch; the trainer, which has it, makes the model and finds what is amiss.
    check_new_model_type(settings)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(dict(settings) | {"vocab_size": vocab_size} | ids, indent=2) + "\n")


def _write_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> None:
    from tokenizers import Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    # A character outside the vocabulary becomes padding, which `Tokenizer.encode` notices.
    fast = Fast(models.WordLevel(vocab=dict(vocabulary), unk_token=_PAD))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    fast.decoder = decoders.Fuse()
    # A plain text begins as a conversation does: the model has seen nothing else.
    fast.post_processor = processors.TemplateProcessing(single=f"{_BOS} $A", special_tokens=[(_BOS, vocabulary[_BOS])])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token=_PAD, bos_token=_BOS, eos_token=_EOS)
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
