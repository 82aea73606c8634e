"""From a problem to the tokens of its prompt, and of its worked solution."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.config import Config
from tandem.common.errors import ConfigError, DataError
from tandem.common.messages import Problem
from tandem.common.tokenizer import Tokenizer


class EncodedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its prompt."""

    problem: Problem
    prompt_ids: tuple[int, ...]


class PromptEncoder:
    """Renders problems by the templates of ``data`` and the tokenizer's chat template."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._data = config.data
        self._tokenizer = tokenizer
        self._max_total = config.policy.max_total_sequence_length
        self._prompt_file = _read("data.prompt_file", config.data.prompt_file)
        self._system_prompt = _read("data.system_prompt_file", config.data.system_prompt_file)
        # Generation always goes on from where the assistant would speak; SFT may leave the marker out.
        self._add_generation_prompt = config.algorithm != "sft" or config.data.add_generation_prompt

    def encode(self, problem: Problem) -> EncodedProblem:
        """Tokenise a problem's prompt. Raises `DataError` if it does not fit the context or cannot be tokenised."""
        messages = [{"role": "user", "content": self._question(problem)}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        try:
            tokens = self._tokenizer.encode_chat(messages, add_generation_prompt=self._add_generation_prompt)
        except DataError as error:
            raise DataError(f"problem {problem.problem_id!r}: {error}") from error
        limit = min(self._data.max_input_seq_length, self._max_total - 1)
        if len(tokens) > limit:
            raise DataError(
                f"problem {problem.problem_id!r}: its prompt has {len(tokens)} tokens, but data.max_input_seq_length and "
                f"policy.max_total_sequence_length leave room for {limit}"
            )
        return EncodedProblem(problem=problem, prompt_ids=tuple(tokens))

    def encode_solution(self, problem: Problem) -> list[int]:
        """Tokenise a problem's worked solution, ended by the end-of-sequence token if ``data.add_eos`` says so."""
        text = fill_template("data.solution_template", self._data.solution_template, problem)
        try:
            tokens = self._tokenizer.encode(text)
        except DataError as error:
            raise DataError(f"problem {problem.problem_id!r}: {error}") from error
        return [*tokens, self._tokenizer.eos_id] if self._data.add_eos else tokens

    def _question(self, problem: Problem) -> str:
        question = fill_template("data.prompt_template", self._data.prompt_template, problem)
        # NeMo-RL's prompt files hold one {} and may hold other braces, as LaTeX does.
        return question if self._prompt_file is None else self._prompt_file.replace("{}", question)


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
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path!r}: {error.strerror}") from error
