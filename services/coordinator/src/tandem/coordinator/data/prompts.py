"""From a problem to the tokens of its prompt, and of its worked solution."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.config import Config
from tandem.common.errors import ConfigError, DataError
from tandem.common.messages import Problem
from tandem.common.tokenizer import Messages, Tokenizer

_FUNCTION = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


class EncodedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its prompt."""

    problem: Problem
    prompt_ids: tuple[int, ...]


class EncodedSolution(msgspec.Struct, frozen=True, kw_only=True):
    """What follows a prompt."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True where the assistant speaks."""

    def extended(self, token_ids: Sequence[int], *, counts: bool) -> EncodedSolution:
        """Return the solution with more tokens at its end."""
        return EncodedSolution(
            token_ids=(*self.token_ids, *token_ids), loss_mask=self.loss_mask + (counts,) * len(token_ids)
        )


class PromptEncoder:
    """Renders problems by the templates of ``data`` and the tokenizer's chat template."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._data = config.data
        self._tokenizer = tokenizer
        self._max_total = config.policy.max_total_sequence_length
        self._prompt_file = _read("data.prompt_file", config.data.prompt_file)
        if self._prompt_file is not None and "{}" not in self._prompt_file:
            raise ConfigError(f"data.prompt_file: {config.data.prompt_file!r} has no {{}} for the prompt to go to")
        self._system_prompt = _read("data.system_prompt_file", config.data.system_prompt_file)
        self._write_solution = solution_writer(config.data.solution_template)
        is_sft = config.algorithm == "sft"
        # Generation goes on from where the assistant would speak; SFT may count that marker as part of the solution.
        self._add_generation_prompt = config.data.add_generation_prompt if is_sft else True
        self._first_ids = [tokenizer.bos_id] if is_sft and config.data.add_bos and tokenizer.bos_id is not None else []

    def encode(self, problem: Problem) -> EncodedProblem:
        """Tokenise a problem's prompt. Raises `DataError` if it does not fit the context or cannot be tokenised."""
        tokens = self._encode(problem, self._prompt(problem))
        if tokens[:1] != self._first_ids:
            tokens = self._first_ids + tokens
        limit = min(self._data.max_input_seq_length, self._max_total - 1)
        if len(tokens) > limit:
            raise DataError(
                f"problem {problem.problem_id!r}: its prompt has {len(tokens)} tokens, but data.max_input_seq_length "
                f"({self._data.max_input_seq_length}) and policy.max_total_sequence_length ({self._max_total}) leave "
                f"room for {limit}"
            )
        return EncodedProblem(problem=problem, prompt_ids=tuple(tokens))

    def encode_solution(self, problem: Problem) -> EncodedSolution:
        """Tokenise what should follow a problem's prompt: the assistant's turn, as the chat template writes it.

        It ends with the end-of-sequence token if the template or ``data.add_eos`` puts it there. Of a conversation each
        turn is tokenised by itself, as a rollout meets it. Raises `DataError`.
        """
        written = self._write_solution(problem)
        messages = [{"role": "assistant", "content": written}] if isinstance(written, str) else written
        solution = EncodedSolution(token_ids=(), loss_mask=())
        said: list[Mapping[str, str]] = []
        for message in messages:
            if message["role"] != "assistant":
                said.append(message)
                continue
            if said:
                solution = solution.extended(self._continuation(problem, said, solution.token_ids), counts=False)
            turn = self._turn(problem, message["content"], is_first=not solution.token_ids)
            solution = solution.extended(turn, counts=True)
            said = []
        if not solution.token_ids or said:
            raise DataError(f"problem {problem.problem_id!r}: its solution does not end with a turn of the assistant")
        return solution

    def _turn(self, problem: Problem, content: str, *, is_first: bool) -> list[int]:
        """Tokenise one turn of the assistant; the first may have the generation prompt as a part of it."""
        add_generation_prompt = self._add_generation_prompt if is_first else True
        messages = self._messages(problem)
        prompt = self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        answered = [*messages, {"role": "assistant", "content": content}]
        whole = self._tokenizer.render_chat(answered, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise DataError(
                "the chat template does not write the assistant's turn after the prompt as it is generated from; "
                f"change data.add_generation_prompt or policy.tokenizer.chat_template (problem {problem.problem_id!r})"
            )
        return self._ended(self._encode(problem, whole[len(prompt) :]))

    def _continuation(self, problem: Problem, messages: Messages, token_ids: tuple[int, ...]) -> list[int]:
        if not token_ids:
            raise DataError(f"problem {problem.problem_id!r}: its solution does not begin with a turn of the assistant")
        try:
            return self._tokenizer.encode_continuation(messages, token_ids[-1])
        except DataError as error:
            raise DataError(f"problem {problem.problem_id!r}: {error}") from error

    def _ended(self, tokens: list[int]) -> list[int]:
        """End a solution where a response ends: a template's line break after the token that ends it is not kept."""
        eos_id = self._tokenizer.eos_id
        if eos_id in tokens:
            end = len(tokens) - tokens[::-1].index(eos_id)
            return tokens[:end] if not self._tokenizer.decode(tokens[end:]).strip() else tokens
        return [*tokens, eos_id] if self._data.add_eos else tokens

    def _encode(self, problem: Problem, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except DataError as error:
            raise DataError(f"problem {problem.problem_id!r}: {error}") from error

    def _prompt(self, problem: Problem) -> str:
        return self._tokenizer.render_chat(self._messages(problem), add_generation_prompt=self._add_generation_prompt)

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        question = fill_template("data.prompt_template", self._data.prompt_template, problem)
        if self._prompt_file is not None:
            # NeMo-RL's prompt files hold one {} and may hold other braces, as LaTeX does.
            question = self._prompt_file.replace("{}", question)
        messages = [{"role": "user", "content": question}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages


def solution_writer(template: str) -> Callable[[Problem], str | Messages]:
    """Return what writes a problem's solution: a function named ``module:function``, or else a format string.

    Only a function can write a conversation.

    Raises `ConfigError` if there is no such function.
    """
    named = _FUNCTION.fullmatch(template)
    if named is None:
        return lambda problem: fill_template("data.solution_template", template, problem)
    try:
        function: Callable[[Problem], str | Messages] = getattr(importlib.import_module(named["module"]), named["name"])
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data.solution_template: cannot import {template!r}: {error}") from error

    def write(problem: Problem) -> str | Messages:
        try:
            return function(problem)
        except Exception as error:  # the function is the user's
            raise DataError(
                f"problem {problem.problem_id!r}: data.solution_template {template} raised "
                f"{type(error).__name__}: {error}"
            ) from error

    return write


def fill_template(key: str, template: str, problem: Problem) -> str:
    """Fill a format string with a problem's question, answer and metadata. Raises `ConfigError` naming the field."""
    fields: Mapping[str, Any] = {
        **problem.metadata,
        "metadata": problem.metadata,
        "question": problem.question,
        "answer": problem.answer,
    }
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        valid = ", ".join(sorted(fields))
        raise ConfigError(f"{key}: cannot fill {template!r}: {error} (fields are {valid})") from error


def _read(key: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
