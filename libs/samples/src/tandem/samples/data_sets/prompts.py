"""Questions of rows, and problems as the messages of a prompt and as tokens, with worked solutions."""

from __future__ import annotations

import contextlib
import importlib
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import msgspec

from tandem.common.errors import ConfigError, DataError
from tandem.common.files import read_text
from tandem.common.kept_inputs import path_of
from tandem.common.messages import Media, Problem, Question
from tandem.common.user_code import shown
from tandem.common.values import fill_template, text_of
from tandem.config import Config
from tandem.config.named import GENERATED, MULTIPLE_CHOICE
from tandem.config.schema import DataConfig
from tandem.samples.chat_templates import REASONING_FIELDS, memory_limit
from tandem.samples.data_sets.order import ItemLengths
from tandem.samples.data_sets.tools import tools_field, tools_of
from tandem.samples.markers import OPENING, as_text, split_front_markers
from tandem.samples.tokenizer import EncodedConversation, Messages, Tokenizer

_PLAIN = "{question}"
"""A template that adds nothing."""
_FUNCTION = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


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
        self._dropped: dict[tuple[str, str], str] = {}
        """Parts of messages that the template does not write and what follows from it, with the place of the first."""

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

    def prompt(self, name: str, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Tokenise a prompt of any length, up to where a response begins. Raise `DataError` if that fails."""
        variables = {"tools": [*tools]} if tools else None
        with self._name_problem(name):
            if len(messages) > 1 or tools:
                text = self._tokenizer.render_chat(messages, add_generation_prompt=True, variables=variables)
                texts = dict.fromkeys(range(len(messages)), text)
                self._note_unseen(name, [*_find_dropped_words(messages, texts), *_find_dropped_tools(tools, text)])
                self._note_unseen(name, self._find_dropped_roles(messages, tools))
            token_ids = self._tokenizer.encode_chat(
                messages, add_generation_prompt=True, variables=variables, add_bos=self._data.add_bos
            )
            return tuple(token_ids)

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
        messages, text = [*prompt, *answer], encoded.rendering.text
        for part in _find_dropped_words(messages, _texts_of_turns(encoded)):
            self._dropped.setdefault((part, "nothing is learned of it"), name)
        self._note_unseen(name, [*_find_dropped_tools(tools, text), *self._find_dropped_roles(messages, tools)])
        if encoded.prompt_length == len(encoded.token_ids):
            raise DataError(f"problem {name!r}: the chat template writes no turn of its solution")
        return encoded

    def _find_dropped_roles(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return whose messages the template does not write, but for the user's and the assistant's."""
        numbers = [
            number
            for number, message in enumerate(messages)
            if message["role"] not in ("user", "assistant") and str(message.get("content") or "").strip()
        ]
        variables = {"tools": [*tools]} if tools else None
        unwritten = self._tokenizer.find_unwritten(messages, numbers, variables)
        return [f"the content of a message of the role {messages[number]['role']!r}" for number in unwritten]

    def _note_unseen(self, name: str, parts: Iterable[str]) -> None:
        """Keep the parts of a prompt that the model does not see, each with the place of the first."""
        for part in parts:
            self._dropped.setdefault((part, "the model does not see it"), name)

    def text(self, name: str, text: str) -> tuple[int, ...]:
        """Tokenise a text without turns, cut to a whole sequence. Raise `DataError` if that fails."""
        with self._name_problem(name):
            prefix_ids = self._tokenizer.prefix_ids if self._data.add_bos else ()
            return (*prefix_ids, *self._tokenizer.encode(text))[: self._max_total]

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices of the parts of conversations so far that the chat template does not write."""
        return tuple(
            f"data: the chat template of {self._tokenizer.where} does not write {part} (first in {name!r}), so "
            f"{consequence}; policy.tokenizer.chat_template can name a file whose template does"
            for (part, consequence), name in self._dropped.items()
        )

    def media(self, messages: Messages) -> Media | None:
        """Return what messages have besides text; None if the model takes text alone."""
        return self._tokenizer.media_in(messages)

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


def _find_dropped_words(messages: Messages, texts: Mapping[int, str]) -> Iterator[str]:
    """Yield what the texts of the assistant's messages lack of these."""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = texts.get(number, "")
        for field in ("content", *REASONING_FIELDS):
            if isinstance(message.get(field), str) and not _shows(text, message[field]):
                yield f"{field!r} of the assistant's messages"
        if any(_name_of(call) not in text for call in message.get("tool_calls") or ()):
            yield "'tool_calls' of the assistant's messages"


def _find_dropped_tools(tools: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """Return the name of the tools if a text lacks one."""
    return ["'tools'"] if any(_name_of(tool) not in text for tool in tools) else []


def _texts_of_turns(encoded: EncodedConversation) -> dict[int, str]:
    """Return what the template writes of each of the assistant's messages."""
    texts = dict[int, str]()
    for turn in encoded.rendering.turns:
        texts[turn.message] = texts.get(turn.message, "") + encoded.rendering.text[turn.header : turn.end] + "\n"
    return texts


def _name_of(function: Mapping[str, Any]) -> str:
    """Return the name of a tool, or of the one that a call is of."""
    return str(function.get("function", function).get("name", ""))


def _shows(text: str, written: str) -> bool:
    """Tell whether a text has all lines of another, apart from the space around them."""
    return all(line.strip() in text for line in written.splitlines())


class PromptedProblem(NamedTuple):
    """A problem, and the settings of its prompt."""

    problem: Problem
    data: DataConfig
    """Section ``data`` of its set: it says how the prompt is written, and what scores the samples."""
    set_name: str = ""
    """Name of that set in metrics, if there are several."""


class EncodedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its prompt."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    environment: str = ""
    """Entry of ``env`` that scores its samples."""
    set_name: str = ""
    """Name of its set in metrics, if there are several."""
    media: Media | None = None
    """All that the prompt has besides tokens; None if the model takes text alone."""
    tools_field: str = ""
    """Field of the problem's metadata with the tools that the prompt shows; empty if it shows none."""


class PromptWriter:
    """A writer of the messages of problems, by the templates of ``data``."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._prompt_file = _prompt_format(data)
        self._system_prompt = data.system_prompt
        if data.system_prompt_file is not None:
            self._system_prompt = read_text("data.system_prompt_file", path_of(data.system_prompt_file))

    def messages(self, problem: Problem) -> Messages:
        """Return the messages before the assistant's turn."""
        question = problem.question
        if isinstance(question, str) or self._has_template:
            question = rewrite_user_text(f"problem {problem.problem_id!r}", question, partial(self._fill, problem))
        return self.prepend_system_message(as_messages(question))

    def tools(self, problem: Problem) -> tuple[dict[str, Any], ...]:
        """Return the tools of a problem's row, which the chat template shows. Raise `DataError` as `tools_of` does."""
        return tools_of(problem, self._data)

    @property
    def tools_field(self) -> str:
        """Field of rows that holds their tools."""
        return tools_field(self._data)

    @property
    def _has_template(self) -> bool:
        return self._prompt_file is not None or self._data.prompt_template != _PLAIN

    def _fill(self, problem: Problem, text: str) -> str:
        """Return the user's text by the templates."""
        of_text = msgspec.structs.replace(problem, question=text)
        filled = fill_template("data.prompt_template", self._data.prompt_template, of_text)
        if self._prompt_file is None:
            return filled
        markers = ""
        if filled.startswith(OPENING):  # as in NeMo-RL, images stand in front of the instructions too
            markers, filled = split_front_markers(filled)
        return markers + self._prompt_file.format(filled)

    def literals(self) -> dict[str, str]:
        """Return the literal texts of the templates, by the key to change."""
        texts = {
            "data.prompt_template": literal_text(self._data.prompt_template),
            "data.prompt_file": literal_text(self._prompt_file or ""),
            "data.system_prompt" if self._data.system_prompt else "data.system_prompt_file": self._system_prompt,
        }
        return {key: text for key, text in texts.items() if text}

    def prepend_system_message(self, messages: Messages) -> Messages:
        """Put the configured system message in front, unless there is one."""
        if self._system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]


class PromptEncoder:
    """A renderer of problems by the templates of their sets and the tokenizer's chat template."""

    def __init__(self, config: Config, tokenizer: Tokenizer, views: Iterable[DataConfig] = ()) -> None:
        """Check and keep the templates; `views` are the sections ``data`` of sets that have their own."""
        self._chat = ChatEncoder(config, tokenizer)
        self._reward_models = config.reward_models
        self._views = [config.data, *views]
        """The writers are keyed by identity, so the views must stay alive."""
        self._writers = {id(view): PromptWriter(view) for view in self._views}

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices of the parts of prompts so far that the chat template does not write."""
        return self._chat.notices

    def check_characters(self, prompted_problems: Iterable[PromptedProblem]) -> None:
        """Raise `DataError` naming all characters of all prompts that the tokenizer does not know."""
        items = ((each.problem.problem_id, (self._messages(each),)) for each in prompted_problems)
        literals = {key: text for writer in self._writers.values() for key, text in writer.literals().items()}
        self._chat.check_characters(items, literals)

    def _messages(self, prompted: PromptedProblem) -> Messages:
        return self._writers[id(prompted.data)].messages(prompted.problem)

    def lengths(self) -> ItemLengths[PromptedProblem, EncodedProblem]:
        """Return how problems are measured, by their messages as JSON."""
        return ItemLengths(
            text_bytes=lambda prompted: len(msgspec.json.encode(self._messages(prompted))),
            num_tokens=lambda encoded: len(encoded.prompt_ids),
            limit=self._chat.prompt_limit,
        )

    def encode(self, prompted: PromptedProblem) -> EncodedProblem | None:
        """Tokenise a problem's prompt; return None if it does not fit the context and is left out.

        Raise `DataError` if it cannot be tokenised, or was generated for this run and does not fit.
        """
        problem, messages = prompted.problem, self._messages(prompted)
        writer = self._writers[id(prompted.data)]
        tools = writer.tools(problem)
        prompt_ids = self._chat.prompt(problem.problem_id, messages, tools)
        if self._chat.leaves_out(problem.problem_id, self._chat.complaint(prompt_ids)):
            return None
        environment = prompted.data.environment or ""
        if environment in self._reward_models:
            problem = msgspec.structs.replace(problem, prompt=tuple(dict(message) for message in messages))
        return EncodedProblem(
            problem=problem,
            prompt_ids=prompt_ids,
            environment=environment,
            set_name=prompted.set_name,
            media=self._chat.media(messages),
            tools_field=writer.tools_field if tools else "",
        )


def literal_text(template: str) -> str:
    """Return the literal text of a format string; a function's is not known."""
    if _FUNCTION.fullmatch(template):
        return ""
    try:
        return "".join(literal for literal, *_ in string.Formatter().parse(template))
    except ValueError:  # filling the template reports the error
        return ""


def solution_writer(key: str, template: str) -> Callable[[Problem], list[Messages]]:
    """Return a writer of a problem's solutions: a function named ``module:function``, or else a format string.

    Only a function can write a conversation, or several solutions. `key` is where `template` is configured. Raise
    `ConfigError` if there is no such function.
    """
    named = _FUNCTION.fullmatch(template)
    if named is None:
        return partial(_write_from_template, key, template)
    try:
        function: Callable[[Problem], str | list[str] | Messages] = getattr(
            importlib.import_module(named["module"]), named["name"]
        )
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: cannot import {template!r}: {error}") from error

    def write(problem: Problem) -> list[Messages]:
        label = f"problem {problem.problem_id!r}: {key} {template}"
        try:
            solution = function(problem)
        except Exception as error:  # the function is the user's
            reason = " ".join(str(error).split())
            raise DataError(f"{label} raised {type(error).__name__}: {reason}") from error
        try:
            return _solutions(solution)
        except (msgspec.ValidationError, DataError) as error:
            raise DataError(f"{label} returned neither a text nor a list of texts or messages: {error}") from error

    return write


def _write_from_template(key: str, template: str, problem: Problem) -> list[Messages]:
    """Return the solution by a format string; of several right answers the first is learned."""
    answer = problem.answer
    if isinstance(answer, list) and answer:
        answer = answer[0]
    if answer is None and "{answer" in template:
        raise DataError(f"{problem.problem_id}: its answer is null (data.output_key), and {key} writes it")
    return [_make_assistant_turn(fill_template(key, template, msgspec.structs.replace(problem, answer=answer)))]


def _solutions(written: object) -> list[Messages]:
    """Return the solutions that a function wrote. Raise `msgspec.ValidationError` for a result of the wrong type."""
    if isinstance(written, list) and written and isinstance(written[0], str):
        return [_make_assistant_turn(text) for text in msgspec.convert(written, list[str])]
    messages = msgspec.convert(written, str | list[dict[str, Any]])
    if isinstance(messages, str):
        return [_make_assistant_turn(messages)]
    return [[read_message(f"message {number + 1}", message) for number, message in enumerate(messages)]]


def _make_assistant_turn(solution: str) -> Messages:
    return [{"role": "assistant", "content": solution}]


def _prompt_format(data: DataConfig) -> str | None:
    """Return ``data.prompt_file`` as the format string that NeMo-RL takes it for; None if there is none.

    NeMo-RL's multiple-choice questions follow their instructions, which are no format string. Raise `ConfigError` for
    a file that cannot be filled, or has no place for the prompt.
    """
    if data.prompt_file is None:
        return None
    text = read_text("data.prompt_file", path_of(data.prompt_file))
    if data.processor == MULTIPLE_CHOICE and "{}" not in text:
        return text.replace("{", "{{").replace("}", "}}") + "\n\n{}"
    label = f"data.prompt_file: {data.prompt_file!r}"
    try:
        text.format("a prompt")
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        fault = f"it has a field {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{label} cannot be filled: {fault}. It is a format string: {{}} stands for the prompt, once, and a brace "
            r"of the text is written twice, as in \boxed{{}}"
        ) from error
    if all(name is None for _, name, _, _ in string.Formatter().parse(text)):
        raise ConfigError(f"{label} has no {{}} for the prompt to go to ({{{{}}}} is a {{}} of the text)")
    return text


_MAX_SHOWN = 200


def read_question(label: str, value: object, mark: Callable[[Any], str] | None = None) -> Question:
    """Return the question that a field holds; `label` names the row and the field.

    Messages keep all their fields; contents that are lists of parts become texts, with what `mark` returns for images.
    Raise `DataError` for a value that is neither a text nor messages, for messages that leave nothing to answer, and
    for images without `mark`.
    """
    if isinstance(value, str | int | float):
        return text_of(value)
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{label}: expected a text or a list of messages, got {shown(value)[:_MAX_SHOWN]}")
    messages = [read_message(f"{label}[{number}]", message, mark) for number, message in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{label}: the last of its messages is the assistant's, so that nothing is left to answer")
    return messages


def read_message(label: str, message: object, mark: Callable[[Any], str] | None = None) -> dict[str, Any]:
    """Return a message with all of its fields; a content that is a list of parts becomes text.

    Raise `DataError` for what is no message, and for an image without `mark`.
    """
    mark = _refuse_media if mark is None else mark
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{label}: expected a message with role and content, got {shown(message)[:_MAX_SHOWN]}")
    # Rows of Parquet have every field of every message: those of other messages are null.
    fields = {name: value for name, value in message.items() if value is not None}
    if "content" not in fields:
        if "tool_calls" not in fields:
            raise DataError(f"{label}: a message of the role {message['role']!r} has no content")
        return {**fields, "content": None}
    try:
        return {**fields, "content": as_text(fields["content"], mark)}
    except DataError as error:
        raise DataError(f"{label}: {error}") from error


def _refuse_media(value: Any) -> NoReturn:
    raise DataError("it has an image, which only vision models take, in a field of the row itself")


def rewrite_user_text(label: str, question: Question, write: Callable[[str], str]) -> Question:
    """Return a question with the user's text rewritten: the text, or the content of the last of the user's messages.

    Raise `DataError`, which begins with `label`, for messages without one of the user.
    """
    if isinstance(question, str):
        return write(question)
    for place in reversed(range(len(question))):
        message = question[place]
        if message["role"] == "user":
            return [
                *question[:place],
                {**message, "content": write(text_of(message["content"]))},
                *question[place + 1 :],
            ]
    raise DataError(f"{label}: none of its messages is the user's, so that no template can be filled")


def as_messages(question: Question) -> Sequence[dict[str, Any]]:
    """Return a question as messages: a text is one of the user."""
    return [{"role": "user", "content": question}] if isinstance(question, str) else question
