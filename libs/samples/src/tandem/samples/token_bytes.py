"""The bytes that tokens stand for, as the vocabulary of a Hugging Face tokenizer spells them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""Pattern of a byte in the vocabulary of a tokenizer that has texts as its other tokens."""


class Spellings:
    """The spellings of one tokenizer's ordinary tokens."""

    def __init__(self, hugging_face: Any) -> None:
        self._hugging_face = hugging_face
        steps = [*_steps(_decoder(hugging_face))]
        self._spells_bytes = any(step["type"] == "ByteLevel" for step in steps)
        self._spaces = _spaces(steps)

    def of(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, empty for an unknown one; None if the vocabulary does not spell them."""
        piece = self._hugging_face.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        if self._spells_bytes and _BYTE_OF.keys() >= set(piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return self.with_spaces(piece).encode() if self._spaces else None

    def with_spaces(self, piece: str) -> str:
        """Return a piece of the vocabulary with spaces for the characters that stand for them."""
        for mark in self._spaces:
            piece = piece.replace(mark, " ")
        return piece


def _decoder(hugging_face: Any) -> Any:
    """Return the description of a tokenizer's decoder from its file; null if it only joins tokens."""
    decoder = hugging_face.backend_tokenizer.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a tokenizer's decoder."""
    if decoder is not None and decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    elif decoder is not None:
        yield decoder


def _spaces(steps: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the characters that stand for a space in the vocabulary of a SentencePiece tokenizer."""
    metaspaces = [step["replacement"] for step in steps if step["type"] == "Metaspace"]
    replaced = [
        step["pattern"]["String"]
        for step in steps
        if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]
    ]
    return (*metaspaces, *replaced)


def _byte_characters() -> dict[str, int]:
    """Return the characters that stand for bytes in the vocabularies of byte-level tokenizers (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
