"""Conversion of a problem to the messages of its prompt, and of its worked solution."""

from __future__ import annotations

import importlib
import re
import string
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from tandem.common.errors import ConfigError, DataError
from tandem.common.files import read_text
from tandem.common.kept_inputs import path_of
from tandem.common.messages import ImageRef, Problem
from tandem.common.values import fill_template
from tandem.config import Config
from tandem.config.named import MULTIPLE_CHOICE
from tandem.config.schema import DataConfig
from tandem.samples.data_sets.chat import ChatEncoder
from tandem.samples.data_sets.order import ItemLengths
from tandem.samples.data_sets.questions import as_messages, read_message, rewrite_user_text
from tandem.samples.images.markers import OPENING, split_front_markers
from tandem.samples.tokenizer import Messages, Tokenizer

_PLAIN = "{question}"
"""A template that adds nothing."""
_FUNCTION = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


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
    images: tuple[ImageRef, ...] | None = None
    """Images of the prompt; None if the model does not see."""


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

    @property
    def _has_template(self) -> bool:
        return self._prompt_file is not None or self._data.prompt_template != _PLAIN

    def _fill(self, problem: Problem, text: str) -> str:
        """Return the user's text by the templates."""
        of_text = msgspec.structs.replace(problem, question=text)
        filled = fill_template("data.prompt_template", self._data.prompt_template, of_text)
        if self._prompt_file is None:
            return filled
        images = ""
        if filled.startswith(OPENING):  # as in NeMo-RL, images stand in front of the instructions too
            images, filled = split_front_markers(filled)
        return images + self._prompt_file.format(filled)

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
        prompt_ids = self._chat.prompt(problem.problem_id, messages)
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
            images=self._chat.images(messages),
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
