"""Conversion of messages to tokens: the prompt, and the assistant's answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tandem.common.errors import ConfigError, DataError
from tandem.common.messages import ImageRef
from tandem.config import Config
from tandem.config.named import GENERATED
from tandem.samples.chat_templates import REASONING_FIELDS, memory_limit
from tandem.samples.tokenizer import EncodedConversation, Messages, Tokenizer


class ChatEncoder:
    """A renderer of conversations by the tokenizer's chat template. Errors name the problem, by `name`."""

    def __init__(self, config: Config, tokenizer: Tokenizer, *, learns_turns: bool = True) -> None:
        """Render as `config` says; without `learns_turns`, sequences are judged as a whole, as a reward model does."""
        self._data = config.data
        self._is_new = config.policy.new_model is not None
        self._tokenizer = tokenizer
        self._max_total = config.policy.max_total_sequence_length
        is_given = not config.declaration.rolls_out
        # A policy generates after the generation prompt. Where solutions are given, that marker may be learned.
        self._learns_header = is_given and learns_turns and not config.data.add_generation_prompt
        self._dropped: dict[str, str] = {}
        """Parts of messages that the template does not write, each with the place of the first."""

    def check_characters(self, items: Iterable[tuple[str, Sequence[Messages]]], literals: Mapping[str, str]) -> None:
        """Raise one `DataError` for all characters of all items that a character-level tokenizer does not know.

        `items` are names, each with a prompt and what may follow it. `literals` are texts that templates add, by the
        key to change. Any other tokenizer knows every character, and then no item is looked at.
        """
        if self._tokenizer.knows_every_character:
            return
        places: dict[str, str] = {}
        for number, (name, (prompt, *answers)) in enumerate(items):
            texts = [str(message.get("content") or "") for messages in (prompt, *answers) for message in messages]
            contents = "".join(texts)
            if number == 0:  # the chat template adds the same to all
                texts.append(self._render(name, prompt, not self._learns_header))
                texts += [self._render(name, [*prompt, *answer], False) for answer in answers]
            for character in self._tokenizer.unknown_characters("".join(texts)):
                if character not in places:
                    by_template = next((key for key, text in literals.items() if character in text), None)
                    by_chat = None if character in contents else "the chat template"
                    places[character] = by_template or by_chat or f"problem {name!r}"
        if places:
            raise DataError(self._describe_unknown(places))

    def _describe_unknown(self, places: Mapping[str, str]) -> str:
        """Describe the unknown characters, grouped by place."""
        together: dict[str, str] = {}
        for character, place in places.items():
            together[place] = together.get(place, "") + character
        count = "1 character" if len(places) == 1 else f"{len(places)} characters"
        listing = ", ".join(f"{characters!r} (first in {place})" for place, characters in together.items())
        hint = "; policy.new_model.characters lacks them" if self._is_new else ""
        return f"the tokenizer in {self._tokenizer.where} does not know {count}: {listing}{hint}"

    def prompt(self, name: str, messages: Messages) -> tuple[int, ...]:
        """Tokenise a prompt of any length, up to where a response begins. Raise `DataError` if that fails."""
        with self._name_problem(name):
            return tuple(self._tokenizer.encode_chat(messages, add_generation_prompt=True, add_bos=self._data.add_bos))

    def conversation(
        self, name: str, prompt: Messages, answer: Messages, tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedConversation:
        """Tokenise a prompt and its answer, rendered once and whole; the assistant's turns of the answer are learned.

        Raise `DataError` if that fails, or if the answer does not begin and end with a turn of the assistant.
        """
        if not answer or answer[-1]["role"] != "assistant":
            raise DataError(f"problem {name!r}: its solution does not end with a turn of the assistant")
        if answer[0]["role"] != "assistant":
            raise DataError(f"problem {name!r}: its solution does not begin with a turn of the assistant")
        with self._name_problem(name):
            encoded = self._tokenizer.encode_conversation(
                [*prompt, *answer],
                num_given=len(prompt),
                learns_header=self._learns_header,
                add_bos=self._data.add_bos,
                add_eos=self._data.add_eos,
                variables={"tools": [*tools]} if tools else None,
            )
        for part in _find_dropped_parts([*prompt, *answer], tools, encoded):
            self._dropped.setdefault(part, name)
        if encoded.prompt_length == len(encoded.token_ids):
            raise DataError(f"problem {name!r}: the chat template writes no turn of its solution")
        return encoded

    def text(self, name: str, text: str) -> tuple[int, ...]:
        """Tokenise a text without turns, cut to a whole sequence. Raise `DataError` if that fails."""
        with self._name_problem(name):
            prefix_ids = self._tokenizer.prefix_ids if self._data.add_bos else ()
            return (*prefix_ids, *self._tokenizer.encode(text))[: self._max_total]

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices of the parts of conversations so far that the chat template does not write."""
        return tuple(
            f"data: the chat template of {self._tokenizer.where} does not write {part} (first in {name!r}), so nothing "
            "is learned of it; policy.tokenizer.chat_template can name a file whose template does"
            for part, name in self._dropped.items()
        )

    def images(self, messages: Messages) -> tuple[ImageRef, ...] | None:
        """Return the images of messages; None if the model does not see."""
        return self._tokenizer.images_in(messages)

    def complaint(self, prompt_ids: Sequence[int]) -> str | None:
        """Describe how a prompt does not fit the context; return None if it fits."""
        limit = self.prompt_limit
        if len(prompt_ids) <= limit:
            return None
        return (
            f"its prompt has {len(prompt_ids)} tokens, but data.max_input_seq_length "
            f"({self._data.max_input_seq_length}) and policy.max_total_sequence_length ({self._max_total}) leave "
            f"room for {limit}"
        )

    @property
    def prompt_limit(self) -> int:
        """Tokens that a prompt may have; a prompt with an answer of no more tokens than that fits, too."""
        return min(self._data.max_input_seq_length, self._max_total - 1)

    def leaves_out(self, name: str, complaint: str | None) -> bool:
        """Return whether an item is left out because it does not fit.

        Only items that were read are left out. An item that was generated stands for all of them: raise `DataError`.
        """
        if complaint is not None and self._data.dataset_name in GENERATED:
            raise DataError(f"problem {name!r}: {complaint}")
        return complaint is not None

    def _render(self, name: str, messages: Messages, add_generation_prompt: bool) -> str:
        with self._name_problem(name):
            return self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)

    @staticmethod
    @contextlib.contextmanager
    def _name_problem(name: str) -> Iterator[None]:
        """Name the problem in errors, and limit the memory of the template."""
        try:
            with memory_limit():
                yield
        except ConfigError as error:
            raise ConfigError(f"{error} (problem {name!r})") from error
        except DataError as error:
            raise DataError(f"problem {name!r}: {error}") from error


def _find_dropped_parts(
    messages: Messages, tools: Sequence[Mapping[str, Any]], encoded: EncodedConversation
) -> Iterator[str]:
    """Yield what a rendered conversation lacks of the assistant's messages, and of the tools."""
    if any(str(tool.get("function", tool).get("name", "")) not in encoded.rendering.text for tool in tools):
        yield "'tools'"
    texts = dict[int, str]()
    for turn in encoded.rendering.turns:
        texts[turn.message] = texts.get(turn.message, "") + encoded.rendering.text[turn.header : turn.end] + "\n"
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = texts.get(number, "")
        for field in ("content", *REASONING_FIELDS):
            if isinstance(message.get(field), str) and not _shows(text, message[field]):
                yield f"{field!r} of the assistant's messages"
        for call in message.get("tool_calls") or ():
            if call.get("function", call).get("name", "") not in text:
                yield "'tool_calls' of the assistant's messages"


def _shows(text: str, written: str) -> bool:
    """Tell whether a text has all lines of another, apart from the space around them."""
    return all(line.strip() in text for line in written.splitlines())
