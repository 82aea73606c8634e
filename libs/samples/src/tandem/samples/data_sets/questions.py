"""The question of a row: a text, or the messages of a conversation that the first response answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tandem.common.errors import DataError
from tandem.common.messages import Question
from tandem.common.user_code import shown
from tandem.common.values import text_of
from tandem.samples.images.markers import as_text

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
    mark = _refuse_image if mark is None else mark
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


def _refuse_image(image: Any) -> NoReturn:
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
