"""Values of rows as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.common.values.json_values import encode_json


def text_of(value: object) -> str:
    """Return a value as text: a text as it is, null as an empty one, anything else as JSON writes it."""
    if isinstance(value, str):
        return value
    return "" if value is None else encode_json(value, str).decode()


def question_text(question: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a question as one text: messages as what they say, each after its role if there are several."""
    if isinstance(question, str):
        return question
    if len(question) == 1:
        return text_of(question[0].get("content"))
    return "\n\n".join(f"{message.get('role')}: {text_of(message.get('content'))}" for message in question)
