"""Messages with lists of parts, as in OpenAI's API and in data sets, as texts with markers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.common.errors import DataError

IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes")
"""Keys of a content part that hold the image, in the order in which they are looked for."""


def mark_images(messages: Sequence[Mapping[str, Any]], mark: Callable[[Any], str]) -> list[dict[str, Any]]:
    """Return messages with texts for contents; `mark` turns the value of an image part into its marker.

    Raises what it raises, and `DataError` for parts that are neither text nor image.
    """
    return [
        {**message, "content": as_text(message["content"], mark)} if message.get("content") is not None else {**message}
        for message in messages
    ]


def as_text(content: Any, mark: Callable[[Any], str]) -> str:
    """Return a message's content as one text; raise the errors of `mark_images`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise DataError(f"a message's content is a text or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        text = _text(part)
        texts.append(mark(_image(part)) if text is None else text)
    return "".join(texts)


def _text(part: Any) -> str | None:
    """Return the text of a content part that is one."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") not in ("text", "input_text"):
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def _image(part: Any) -> Any:
    """Return the value of a content part that is an image. Raises `DataError` for any other."""
    kind = part.get("type", "image") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url", "input_image"):
        raise DataError(f"a content part is a text or an image, not {_name_part(part)}")
    # Rows of Parquet have every key of every part: those of other parts are null.
    value = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
    if value is None:
        raise DataError(f"a content part of type {kind} has none of {', '.join(IMAGE_KEYS)}")
    return value


def _name_part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return type(part).__name__
    return f"{part.get('type', 'an object without type')!s}"[:100]
