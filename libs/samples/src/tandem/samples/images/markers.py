"""Images within the text of a message: a marker stands for each, and says which it is and how large.

So a message stays a text on its whole way, from a data set, an environment or a client to the tokenizer. Only the
tokenizer of a vision model (`tandem.samples.images.chat`) turns markers into tokens.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MARKER = re.compile(r"⟦image ([0-9a-f]{64}) ([1-9][0-9]{0,5})x([1-9][0-9]{0,5})⟧")

_IN_FRONT = re.compile(rf"(?:{_MARKER.pattern})+")
OPENING = "⟦"
"""Character that each marker begins with."""


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
