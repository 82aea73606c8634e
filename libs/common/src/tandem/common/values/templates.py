"""Templates: format strings filled with a problem's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.common.values.answer_texts import show_answer
from tandem.common.values.texts import question_text


def fill_template(key: str, template: str, problem: Problem, **more: str) -> str:
    """Fill a format string with a problem's question, answer and metadata. Raises `ConfigError` naming the field.

    Several right answers are written with `` or `` between them.
    """
    fields: Mapping[str, Any] = {
        **problem.metadata,
        "metadata": problem.metadata,
        "question": question_text(problem.question),
        "answer": show_answer(problem.answer),
        **more,
    }
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        valid = ", ".join(sorted(fields))
        raise ConfigError(f"{key}: cannot fill {template!r}: {error} (fields are {valid})") from error
