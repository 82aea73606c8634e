"""Tokenizers: conversion of text to tokens and back, and the character-level tokenizer of a new model.

Transformers is imported only where it is needed: that takes half a second, and ``--help`` does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.common.errors import ConfigError, DataError, ModelError
from tandem.common.messages import ImageRef
from tandem.samples.chat_templates import ChatTemplate, Messages
from tandem.samples.decoding import Decoder
from tandem.samples.unchanged_files import save_tokenizer

__all__ = ["Messages", "Tokenizer"]

KEY = "policy.tokenizer"
_TURN = "what the assistant said"
"""Placeholder for an assistant's turn, which has known tokens and an irrelevant text."""


class Tokenizer(Decoder):
    """A Hugging Face tokenizer, reduced to what Tandem needs."""

    def __init__(
        self, hugging_face: Any, where: str, variables: Mapping[str, Any] | None = None, key: str = KEY
    ) -> None:
        """Wrap a tokenizer; `variables` are the chat template's defaults, `key` is the tokenizer's key."""
        super().__init__(hugging_face)
        self._variables = dict(variables or {})
        self.where = where
        """Folder that it comes from."""
        self._template = ChatTemplate(hugging_face, where, key)
        self._alphabet = _alphabet(hugging_face)

    @property
    def hugging_face(self) -> Any:
        """The Transformers tokenizer behind it, for libraries that need one."""
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
        """Return a description of the first token that differs in another tokenizer; None if all agree."""
        own, others = self._hugging_face.get_vocab(), other._hugging_face.get_vocab()
        token = next((token for token in sorted({*own, *others}) if own.get(token) != others.get(token)), None)
        if token is None:
            return None
        here, there = (vocabulary.get(token, "none") for vocabulary in (own, others))
        return f"token {token!r} is {here} in {self.where} and {there} in {other.where}"

    @property
    def image_token_id(self) -> int | None:
        """The token that stands for a feature of an image; None, as here, if the model does not see."""
        return None

    @property
    def pad_id(self) -> int:
        """The padding token, or else the end-of-sequence token.

        Raises `ModelError` if the tokenizer has neither.
        """
        pad_id = self._hugging_face.pad_token_id
        return self.eos_id if pad_id is None else int(pad_id)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations have a format; without one they are the plain text of their messages."""
        return self._hugging_face.chat_template is not None

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template can present tools to the model."""
        return self.has_chat_template and "tools" in self._template.words

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that a conversation may set for the chat template."""
        return self._template.variables if self.has_chat_template else frozenset()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text by the chat template, with further `variables`.

        Raises `ConfigError` if the template is broken, refuses the conversation, or does not terminate.
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
        """Return the tokens of a conversation. Raises the errors of `render_chat` and `encode`."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables))

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return False

    def images_in(self, messages: Sequence[Mapping[str, Any]]) -> tuple[ImageRef, ...] | None:
        """Return the images of messages, in order; None, as here, if the model does not see."""
        return None

    def encode_continuation(
        self, messages: Sequence[Mapping[str, Any]], last_id: int, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the tokens between the end of an assistant's turn, `last_id`, and the beginning of its next one.

        `messages` are those in between. The chat template renders them after a turn of the assistant. Only what the
        template writes after that turn's content is tokenised, so that all earlier tokens stay unchanged. If the
        turn already ended with the template's end token, that is not repeated. Raises the errors of `render_chat`
        and `encode`.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        rendered = self.render_chat([*before, *messages], add_generation_prompt=True, variables=variables)
        _, turn, rest = rendered.partition(_TURN)
        if not turn:
            raise ConfigError(f"policy.tokenizer.chat_template: the chat template of {self.where} drops earlier turns")
        if last_id in self._special_ids:  # an ordinary token only looks like the end token by chance
            rest = rest.removeprefix(self.decode([last_id], skip_special_tokens=False))
        return self.encode(rest)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text, with the tokenizer's own special tokens only if requested.

        Raises `DataError` for characters the tokenizer does not know.
        """
        unknown = self.unknown_characters(text)
        if unknown:
            what = "character" if len(unknown) == 1 else "characters"
            raise DataError(f"the tokenizer in {self.where} does not know the {what} {unknown!r}")
        return [int(token) for token in self._hugging_face(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the tokens of a word at the beginning of a text and, if one other token begins them, after a space.

        These are what vLLM forbids of ``bad_words``. Raises `DataError` if the word has no token, or an unknown
        character.
        """
        plain = tuple(self.encode(word.lstrip()))
        if not plain:
            raise DataError(f"the tokenizer in {self.where} makes no token of {word!r}")
        spaced = () if self.unknown_characters(" ") else tuple(self.encode(f" {word.lstrip()}"))
        is_another = len(spaced) == len(plain) and spaced[0] != plain[0]
        return [plain, spaced] if is_another else [plain]

    @property
    def knows_every_character(self) -> bool:
        """Whether every character has a token, so that `unknown_characters` finds none."""
        return self._alphabet is None

    def unknown_characters(self, text: str) -> str:
        """Return the characters of a text that have no token, each once, in order."""
        if self._alphabet is None or self._alphabet.issuperset(text):
            return ""
        return "".join(dict.fromkeys(c for c in self._without_special(text) if c not in self._alphabet))

    def _without_special(self, text: str) -> str:
        for token in self._hugging_face.all_special_tokens:
            text = text.replace(token, "")
        return text

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files beside a model's weights, as they are where it was read from."""
        save_tokenizer(self._hugging_face, folder)


def _alphabet(hugging_face: Any) -> frozenset[str] | None:
    """Return the characters of a character-level tokenizer; None for any other, which can represent every text."""
    from tokenizers.models import WordLevel

    if not isinstance(hugging_face.backend_tokenizer.model, WordLevel):
        return None
    special = set(hugging_face.all_special_tokens)
    ordinary = frozenset(token for token in hugging_face.get_vocab() if token not in special)
    return ordinary if all(len(token) == 1 for token in ordinary) else None
