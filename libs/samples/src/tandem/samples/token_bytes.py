"""Texts and bytes of tokens, by a Hugging Face tokenizer and the spellings of its vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""Pattern of a byte in the vocabulary of a tokenizer that has texts as its other tokens."""


class TextDecoder:
    """A Hugging Face tokenizer, as far as it reads tokens."""

    def __init__(self, hugging_face: Any) -> None:
        """Wrap a tokenizer."""
        self._hugging_face = hugging_face
        added = hugging_face.added_tokens_decoder
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = True, kept_ids: frozenset[int] = frozenset()
    ) -> str:
        """Return the text of tokens; special tokens in `kept_ids` are not skipped."""
        if kept_ids and skip_special_tokens:
            tokens = [token for token in tokens if token in kept_ids or token not in self._special_ids]
            skip_special_tokens = False
        return str(
            self._hugging_face.decode(
                list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )


class TokenSpellings:
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
        return self.restore_spaces(piece).encode() if self._spaces else None

    def restore_spaces(self, piece: str) -> str:
        """Return a piece of the vocabulary with spaces for the characters that stand for them."""
        for mark in self._spaces:
            piece = piece.replace(mark, " ")
        return piece


class TokenDecoder(TextDecoder):
    """A decoder of single tokens, too."""

    def __init__(self, hugging_face: Any) -> None:
        super().__init__(hugging_face)
        self._spellings: TokenSpellings | None = None
        self._marker_ids: dict[tuple[str, ...], frozenset[int]] = {}

    def marker_ids(self, markers: tuple[str, ...]) -> frozenset[int]:
        """Return the special tokens that are markers in a text, or parts of one."""
        if markers not in self._marker_ids:
            self._marker_ids[markers] = frozenset(
                token_id for token_id in self._special_ids if any(self._added[token_id] in text for text in markers)
            )
        return self._marker_ids[markers]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text, which may be a part of a character; empty for an unknown id.

        The bytes of a text's tokens, joined, are the text. SentencePiece tokenizers that put a space in front of every
        text, as Llama 2's does, have it there too: it is of the first token, and `decode` leaves it out.
        """
        if self._spellings is None:
            self._spellings = TokenSpellings(self._hugging_face)
        if (content := self._added.get(token_id)) is not None:
            return (content if token_id in self._special_ids else self._spellings.restore_spaces(content)).encode()
        spelt = self._spellings.of(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode() if spelt is None else spelt

    def token_text(self, token_id: int) -> str:
        """Return the text of a token within a text; a part of a character is shown as such."""
        return self.token_bytes(token_id).decode(errors="replace")


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
    other_bytes = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(other_bytes)}


_BYTE_OF = _byte_characters()
