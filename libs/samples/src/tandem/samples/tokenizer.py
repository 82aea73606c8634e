"""Tokenizers: conversion of text to tokens and back, and the character-level tokenizer of a new model.

Transformers is imported only where it is needed: that takes half a second, and ``--help`` does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tandem.common.errors import DataError, ModelError
from tandem.common.messages import Media
from tandem.samples.batch import SampleBatch
from tandem.samples.chat_templates import ChatTemplate, Messages
from tandem.samples.token_bytes import TokenDecoder
from tandem.samples.turns.ends import TurnEnds, read_turn_ends, render_after_turn
from tandem.samples.turns.rendering import (
    Render,
    RenderedConversation,
    append_mark,
    common_length,
    find_end,
    join_texts,
    locate_turns,
    mark_of,
)
from tandem.samples.unchanged_files import save_tokenizer

__all__ = ["Messages", "Tokenizer"]

KEY = "policy.tokenizer"


class EncodedConversation(NamedTuple):
    """The tokens of a conversation, and which of them are learned."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True for the assistant's tokens, up to and with the one that ends a turn."""
    prompt_length: int
    """Tokens before the first turn that is learned."""
    rendering: RenderedConversation
    """The text, and where the assistant's turns are in it."""


class Tokenizer(TokenDecoder):
    """A Hugging Face tokenizer, reduced to what Tandem needs."""

    def __init__(
        self, hugging_face: Any, source: str, variables: Mapping[str, Any] | None = None, key: str = KEY
    ) -> None:
        """Wrap a tokenizer; `variables` are the chat template's defaults, `key` is the tokenizer's key."""
        super().__init__(hugging_face)
        self._variables = dict(variables or {})
        self.where = source
        """Folder that it comes from."""
        self._template = ChatTemplate(hugging_face, source, key)
        self._alphabet = _alphabet(hugging_face)
        self.model_folders: tuple[Path, ...] = (Path(source),)
        """Folders whose `generation_config.json` and `config.json` say what ends a response."""

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

    def difference(self, peer: Tokenizer) -> str | None:
        """Return a description of the first token that differs in another tokenizer; None if all agree."""
        own_ids, peer_ids = self._hugging_face.get_vocab(), peer._hugging_face.get_vocab()
        token = next(
            (token for token in sorted({*own_ids, *peer_ids}) if own_ids.get(token) != peer_ids.get(token)), None
        )
        if token is None:
            return None
        own_id, peer_id = (ids.get(token, "none") for ids in (own_ids, peer_ids))
        return f"token {token!r} is {own_id} in {self.where} and {peer_id} in {peer.where}"

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
            return join_texts(messages).text
        all_variables = self._variables | dict(variables or {})
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=all_variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        add_bos: bool = True,
    ) -> list[int]:
        """Return the tokens of a conversation.

        A text without a template begins with what the tokenizer puts in front of texts, if `add_bos`. Raises the errors
        of `render_chat` and `encode`.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return [*(self.prefix_ids if add_bos and not self.has_chat_template else ()), *self.encode(text)]

    @property
    def takes_media(self) -> bool:
        """Whether the model takes more than text."""
        return False

    def media_in(self, messages: Sequence[Mapping[str, Any]]) -> Media | None:
        """Return what messages have besides text, in order; None, as here, if the model takes text alone."""
        return None

    def media_of_prompt(self, sample: SampleBatch, prompt_length: int) -> bytes:
        """Return the digests of the media in a recorded sample's prompt; empty, as here, for text alone."""
        return b""

    def explain_wrong_media(self, prompt_ids: Sequence[int], media: Media) -> str | None:
        """Return what is wrong with the media of a prompt; None if its tokens are those of its media."""
        return "the model does not see" if media else None

    @cached_property
    def turn_ends(self) -> TurnEnds:
        """Tokens that end a turn, by template, tokenizer and the model's files; `ModelError` if there is none."""
        render = self._plain_render({}) if self.has_chat_template else None
        return read_turn_ends(render, self._undivided, self.eos_id, self.model_folders)

    def stop_conditions(
        self, token_ids: Sequence[int] = (), texts: Sequence[str] = ()
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return all tokens that end a response, with `token_ids`, and the texts that are left to look for.

        A text that is a token of its own, such as ``<end_of_turn>``, is looked for as that token.
        """
        stop_texts = tuple(text for text in texts if text not in self._undivided)
        ends = (*self.turn_ends.stop_ids, *token_ids, *self.undivided_ids(texts))
        return tuple(dict.fromkeys(ends)), stop_texts

    def undivided_ids(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of those texts that are a token of their own."""
        return [self._undivided[text] for text in texts if text in self._undivided]

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens that the tokenizer itself puts in front of a text, such as BOS.

        A chat template writes its own, so they are for texts without one.
        """
        plain = self._hugging_face("1", add_special_tokens=False)["input_ids"]
        prefixed = self._hugging_face("1", add_special_tokens=True)["input_ids"]
        place = next((n for n in range(len(prefixed)) if plain and prefixed[n : n + len(plain)] == plain), 0)
        return tuple(int(token) for token in prefixed[:place])

    @cached_property
    def _undivided(self) -> dict[str, int]:
        """Tokens that no text is divided within, by their texts: the special ones, and others that were added."""
        return {token.content: token_id for token_id, token in self._hugging_face.added_tokens_decoder.items()}

    def _plain_render(self, variables: Mapping[str, Any]) -> Render:
        def render(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
            return self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)

        return render

    def find_unwritten(
        self,
        messages: Sequence[Mapping[str, Any]],
        numbers: Sequence[int],
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return those of the messages with these `numbers` of which the chat template writes no content.

        Raises the errors of `render_chat`.
        """
        unwritten = list[int]()
        for number in numbers:
            marked = append_mark(messages[number], mark_of(number))
            conversation = [*messages[:number], marked or messages[number], *messages[number + 1 :]]
            text = self.render_chat(conversation, add_generation_prompt=False, variables=variables)
            if marked is not None and mark_of(number) not in text:
                unwritten.append(number)
        return unwritten

    def render_conversation(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> RenderedConversation:
        """Return a conversation as text, rendered once and whole, and where the assistant's turns are in it.

        Raises the errors of `render_chat`, and `ConfigError` if the turns cannot be found in what the template writes.
        """
        if not self.has_chat_template:
            return join_texts(messages)
        all_variables = self._variables | dict(variables or {})
        generated = (
            self._template.find_generated(messages, variables=all_variables) if self._template.marks_generated else ()
        )
        is_by_marker = self.turn_ends.missing_id not in (self.eos_id, *self.turn_ends.closing_ids)
        markers = tuple(self._undivided) if is_by_marker else ()
        return locate_turns(self._plain_render(dict(variables or {})), messages, self._end_texts, generated, markers)

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        """The texts of the tokens that end a turn."""
        texts = {token_id: text for text, token_id in self._undivided.items()}
        return tuple(texts[token] for token in self.turn_ends.all_ids if token in texts)

    def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        num_given: int = 0,
        learns_header: bool = False,
        add_bos: bool = True,
        add_eos: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> EncodedConversation:
        """Return the tokens of a conversation up to the end of the assistant's last turn, and which are learned.

        Args:
            messages: the conversation; a turn with ``weight: 0`` is not learned.
            num_given: messages whose turns are given, not learned.
            learns_header: learn what the template writes before each turn, too.
            add_bos: begin a text without a template with what the tokenizer puts in front of texts.
            add_eos: end a turn that the template does not close with the token that ends turns.
            variables: further ones for the template, such as ``tools``.

        Raises the errors of `render_conversation` and `encode`.
        """
        rendering = self.render_conversation(messages, variables)
        learned = [turn for turn in rendering.turns if turn.message >= num_given]
        # Of a later turn a template may write less: DeepSeek-V3's second calls have no header.
        if not learns_header and learned and not learned[0].is_as_prompted and learned[0] == rendering.turns[0]:
            raise DataError(
                "the chat template does not write the assistant's turn after the prompt as it is generated from; "
                "change data.add_generation_prompt or policy.tokenizer.chat_template"
            )
        places = [place for turn in learned for place in (turn.header if learns_header else turn.begin, turn.end)]
        text = rendering.text[: places[-1]] if places else self._strip_tail(rendering)
        before, *parts = self.encode_parts(text, places[:-1] if places else ())
        token_ids = [*(() if self.has_chat_template or not add_bos else self.prefix_ids), *before]
        mask = [False] * len(token_ids)
        prompt_length = len(token_ids)
        for number, part in enumerate(parts):  # the turns, and what is between two of them
            turn = learned[number // 2]
            is_turn = number % 2 == 0
            following = learned[number // 2 + 1 :][:1]
            is_joined = any(turn.end == later.begin for later in following)  # by a template that writes two as one
            if is_turn and not turn.is_closed and not is_joined and add_eos:
                part = [*part, self.turn_ends.missing_id]
            token_ids += part
            mask += [is_turn and messages[turn.message].get("weight") != 0] * len(part)
        return EncodedConversation(tuple(token_ids), tuple(mask), prompt_length, rendering)

    def encode_parts(self, text: str, places: Sequence[int]) -> list[list[int]]:
        """Return the tokens of a text, divided at these characters.

        The text is tokenised as a whole, unless a token would reach across one of the places: a response is generated
        after the tokens of its prompt, so that there the text is divided first. Raises the errors of `encode`.
        """
        bounds = [0, *places, len(text)]
        self._check_characters(text)
        encoded = self._hugging_face(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        crossed = [place for place in bounds[1:-1] if any(begin < place < end for begin, end in offsets)]
        if crossed:
            cut = crossed[0]
            left_parts = self.encode_parts(text[:cut], [place for place in places if place < cut])
            right_parts = self.encode_parts(text[cut:], [place - cut for place in places if place > cut])
            return [*left_parts, *right_parts]
        parts: list[list[int]] = [[] for _ in bounds[1:]]
        number = 0
        for token, (begin, _) in zip(encoded["input_ids"], offsets, strict=True):
            while number + 1 < len(parts) and begin >= bounds[number + 1]:
                number += 1
            parts[number].append(int(token))
        return parts

    def _strip_tail(self, rendering: RenderedConversation) -> str:
        """Return a rendered text without the space after the token that ends its last turn."""
        text = rendering.text.rstrip()
        return text if text.endswith(self._end_texts) else rendering.text

    def encode_continuation(
        self,
        messages: Sequence[Mapping[str, Any]],
        last_id: int,
        variables: Mapping[str, Any] | None = None,
        turn: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens between the end of an assistant's turn, `last_id`, and the beginning of its next one.

        `messages` are those in between, and `turn` is the one before, if its calls are known. The chat template renders
        them after a turn of the assistant, with a call where a tool answers one. Only what the template writes after
        that turn's content is tokenised, so that all earlier tokens stay unchanged. What ended the turn is not
        repeated. Raises the errors of `render_chat` and `encode`, and `ConfigError` if the template drops the messages.
        """
        if not self.has_chat_template:
            return self._encode_after(last_id, join_texts(messages).text)
        rendered = render_after_turn(self._plain_render(dict(variables or {})), messages, turn, self.where)
        continuation, tail = rendered.text, rendered.call_tail
        place = find_end(continuation, self._end_texts, 0, rendered.content_end)
        if place is None:
            return self._encode_after(last_id, continuation[common_length(continuation, tail) :])
        end = continuation[slice(*place)]
        # A marker that only the next message brings, such as GLM's `<|user|>`, is dropped if it was generated.
        is_own = end in tail or self._undivided[end] in self.turn_ends.closing_ids
        was_ended = last_id == self._undivided[end] or (is_own and last_id in self.turn_ends.all_ids)
        return self._encode_after(last_id, continuation[place[1 if was_ended else 0] :])

    def _encode_after(self, last_id: int, text: str) -> list[int]:
        """Return the tokens of a text that follows a token: some tokenizers begin a text with a space of their own."""
        before = self.decode([last_id], skip_special_tokens=False)
        return self.encode_parts(before + text, [len(before)])[1] if last_id in self._special_ids else self.encode(text)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text, with the tokenizer's own special tokens only if requested.

        Raises `DataError` for characters the tokenizer does not know.
        """
        self._check_characters(text)
        return [int(token) for token in self._hugging_face(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def _check_characters(self, text: str) -> None:
        unknown = self.unknown_characters(text)
        if unknown:
            noun = "character" if len(unknown) == 1 else "characters"
            raise DataError(f"the tokenizer in {self.where} does not know the {noun} {unknown!r}")

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

    @property
    def alphabet(self) -> frozenset[str] | None:
        """The characters of a character-level tokenizer, each of which is a token; None for any other tokenizer."""
        return self._alphabet

    def short_text(self) -> str:
        """Return a short text that has a token for each character, as an example."""
        for text in ("Hello", "1+1="):
            if not self.unknown_characters(text):
                return text
        return "".join(sorted(each for each in self._alphabet or () if each.isalnum())[:5])

    def unknown_characters(self, text: str) -> str:
        """Return the characters of a text that have no token, each once, in order."""
        if self._alphabet is None or self._alphabet.issuperset(text):
            return ""
        return "".join(dict.fromkeys(c for c in self._strip_special(text) if c not in self._alphabet))

    def _strip_special(self, text: str) -> str:
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
