"""Images within the text of a message: a marker stands for each; and messages with lists of parts.

So a message stays a text on its whole way, from a data set, an environment or a client to the tokenizer. Only the
tokenizer of a vision model (`tandem.samples.images.chat`) turns markers into tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.common.errors import DataError

_MARKER = re.compile(r"⟦image ([0-9a-f]{64}) ([1-9][0-9]{0,5})x([1-9][0-9]{0,5})⟧")

_IN_FRONT = re.compile(rf"(?:{_MARKER.pattern})+")
OPENING = "⟦"
"""Character that each marker begins with."""
IMAGE_FIELDS = ("image", "images")
"""Fields of rows that may hold images; ``data.image_key`` names another."""
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


class MarkedImage(NamedTuple):
    """An image that a marker stands for."""

    digest: str
    """SHA-256 of its encoded bytes, in hexadecimal."""
    width: int
    height: int


def marker(digest: str, width: int, height: int) -> str:
    """Return the marker of an image."""
    return f"⟦image {digest} {width}x{height}⟧"


def split_at_markers(text: str) -> list[str | MarkedImage]:
    """Return a text's parts in order: text between markers, never empty, and images."""
    parts: list[str | MarkedImage] = []
    end = 0
    for match in _MARKER.finditer(text):
        if match.start() > end:
            parts.append(text[end : match.start()])
        parts.append(MarkedImage(match[1], int(match[2]), int(match[3])))
        end = match.end()
    return [*parts, text[end:]] if end < len(text) else parts


def split_front_markers(text: str) -> tuple[str, str]:
    """Return the markers that a text begins with, and the rest of it."""
    match = _IN_FRONT.match(text)
    end = 0 if match is None else match.end()
    return text[:end], text[end:]


def marked_in(text: str) -> list[MarkedImage]:
    """Return the images of a text."""
    return [part for part in split_at_markers(text) if isinstance(part, MarkedImage)]


def shown(text: str) -> str:
    """Return a text as people read it: ``[image 640×480 3f9ac2]`` for a marker."""
    return _MARKER.sub(lambda match: f"[image {match[2]}×{match[3]} {match[1][:6]}]", text)
