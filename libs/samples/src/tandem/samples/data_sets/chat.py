"""Conversion of messages to tokens: the prompt, and the assistant's answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.common.errors import ConfigError, DataError
from tandem.common.messages import ImageRef
from tandem.config import Config
from tandem.config.derive import GENERATED
from tandem.samples.chat_templates import memory_limit
from tandem.samples.tokenizer import Messages, Tokenizer


class EncodedSolution(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens after a prompt."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True for tokens of the assistant."""

    def extended(self, token_ids: Sequence[int], *, counts: bool) -> EncodedSolution:
        """Return the solution with more tokens at its end."""
        return EncodedSolution(
            token_ids=(*self.token_ids, *token_ids), loss_mask=self.loss_mask + (counts,) * len(token_ids)
        )


class ChatEncoder:
    """A renderer of conversations by the tokenizer's chat template. Errors name the problem, by `name`."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._data = config.data
        self._is_new = config.policy.new_model is not None
        self._tokenizer = tokenizer
        self._max_total = config.policy.max_total_sequence_length
        is_given = not config.declaration.rolls_out
        # A policy generates after the generation prompt. Where solutions are given, that marker may be part of them.
        self._add_generation_prompt = config.data.add_generation_prompt if is_given else True
        self._first_ids = (
            [tokenizer.bos_id] if is_given and config.data.add_bos and tokenizer.bos_id is not None else []
        )

    def check_characters(self, items: Iterable[tuple[str, Sequence[Messages]]], literals: Mapping[str, str]) -> None:
        """Raise one `DataError` for all characters of all items that a character-level tokenizer does not know.

        `items` are names, each with a prompt and what may follow it. `literals` are texts that templates add, by the
        key to change. Any other tokenizer knows every character, and then no item is looked at.
        """
        if self._tokenizer.knows_every_character:
            return
        places: dict[str, str] = {}
        for number, (name, (prompt, *answers)) in enumerate(items):
            texts = [message["content"] for messages in (prompt, *answers) for message in messages]
            if number == 0:  # the chat template adds the same to all
                texts.append(self._render(name, prompt, self._add_generation_prompt))
                texts += [self._render(name, [*prompt, *answer], False) for answer in answers]
            said = "".join(texts[: sum(map(len, (prompt, *answers)))])
            for character in self._tokenizer.unknown_characters("".join(texts)):
                if character not in places:
                    by_template = next((key for key, text in literals.items() if character in text), None)
                    by_chat = None if character in said else "the chat template"
                    places[character] = by_template or by_chat or f"problem {name!r}"
        if places:
            raise DataError(self._unknown(places))

    def _unknown(self, places: Mapping[str, str]) -> str:
        """Describe the unknown characters, grouped by place."""
        together: dict[str, str] = {}
        for character, place in places.items():
            together[place] = together.get(place, "") + character
        what = "1 character" if len(places) == 1 else f"{len(places)} characters"
        found = ", ".join(f"{characters!r} (first in {place})" for place, characters in together.items())
        hint = "; policy.new_model.characters lacks them" if self._is_new else ""
        return f"the tokenizer in {self._tokenizer.where} does not know {what}: {found}{hint}"

    def prompt(self, name: str, messages: Messages) -> tuple[int, ...]:
        """Tokenise a prompt of any length. Raise `DataError` if that fails."""
        tokens = self._encode(name, self._render(name, messages, self._add_generation_prompt))
        if tokens[:1] != self._first_ids:
            tokens = self._first_ids + tokens
        return tuple(tokens)

    def images(self, messages: Messages) -> tuple[ImageRef, ...] | None:
        """Return the images of messages; None if the model does not see."""
        return self._tokenizer.images_in(messages)

    def complaint(self, prompt_ids: Sequence[int]) -> str | None:
        """Describe how a prompt does not fit the context; return None if it fits."""
        limit = min(self._data.max_input_seq_length, self._max_total - 1)
        if len(prompt_ids) <= limit:
            return None
        return (
            f"its prompt has {len(prompt_ids)} tokens, but data.max_input_seq_length "
            f"({self._data.max_input_seq_length}) and policy.max_total_sequence_length ({self._max_total}) leave "
            f"room for {limit}"
        )

    def leaves_out(self, name: str, complaint: str | None) -> bool:
        """Return whether an item is left out because it does not fit.

        Only items that were read are left out. An item that was generated stands for all of them: raise `DataError`.
        """
        if complaint is not None and self._data.dataset_name in GENERATED:
            raise DataError(f"problem {name!r}: {complaint}")
        return complaint is not None

    def solution(self, name: str, prompt: Messages, messages: Messages) -> EncodedSolution:
        """Tokenise the solution of a prompt: turns of the assistant, as the chat template writes them.

        It ends with the end-of-sequence token if the template or ``data.add_eos`` puts it there. Each of several turns
        is tokenised by itself, as in a rollout. Raise `DataError` if that fails.
        """
        solution = EncodedSolution(token_ids=(), loss_mask=())
        said: list[Mapping[str, str]] = []
        for message in messages:
            if message["role"] != "assistant":
                said.append(message)
                continue
            if said:
                solution = solution.extended(self._continuation(name, said, solution.token_ids), counts=False)
            turn = self._turn(name, prompt, message["content"], is_first=not solution.token_ids)
            solution = solution.extended(turn, counts=True)
            said = []
        if not solution.token_ids or said:
            raise DataError(f"problem {name!r}: its solution does not end with a turn of the assistant")
        return solution

    def _turn(self, name: str, prompt: Messages, content: str, *, is_first: bool) -> list[int]:
        """Tokenise one turn of the assistant; the first may include the generation prompt."""
        add_generation_prompt = self._add_generation_prompt if is_first else True
        before = self._render(name, prompt, add_generation_prompt)
        answered = [*prompt, {"role": "assistant", "content": content}]
        whole = self._render(name, answered, False)
        if not whole.startswith(before):
            raise DataError(
                "the chat template does not write the assistant's turn after the prompt as it is generated from; "
                f"change data.add_generation_prompt or policy.tokenizer.chat_template (problem {name!r})"
            )
        return self._ended(self._encode(name, whole[len(before) :]))

    def _continuation(self, name: str, messages: Messages, token_ids: tuple[int, ...]) -> list[int]:
        if not token_ids:
            raise DataError(f"problem {name!r}: its solution does not begin with a turn of the assistant")
        try:
            with memory_limit():
                return self._tokenizer.encode_continuation(messages, token_ids[-1])
        except DataError as error:
            raise DataError(f"problem {name!r}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{error} (problem {name!r})") from error

    def _ended(self, tokens: list[int]) -> list[int]:
        """End a solution where a response ends: drop a template's line break after the end-of-sequence token."""
        eos_id = self._tokenizer.eos_id
        if eos_id in tokens:
            end = len(tokens) - tokens[::-1].index(eos_id)
            return tokens[:end] if not self._tokenizer.decode(tokens[end:]).strip() else tokens
        return [*tokens, eos_id] if self._data.add_eos else tokens

    def _render(self, name: str, messages: Messages, add_generation_prompt: bool) -> str:
        try:
            with memory_limit():
                return self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        except ConfigError as error:
            raise ConfigError(f"{error} (problem {name!r})") from error

    def _encode(self, name: str, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except DataError as error:
            raise DataError(f"problem {name!r}: {error}") from error
