"""The texts and bytes of tokens, by a Hugging Face tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
"""Pattern of a byte in the vocabulary of a tokenizer that has texts as its other tokens."""


class Decoder:
    """A Hugging Face tokenizer, as far as it reads tokens."""

    def __init__(self, hugging_face: Any) -> None:
        """Wrap a tokenizer."""
        self._hugging_face = hugging_face
        self._spells_bytes = '"ByteLevel"' in json.dumps(_decoder(hugging_face))
        added = hugging_face.added_tokens_decoder
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._marker_ids: dict[tuple[str, ...], frozenset[int]] = {}

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> str:
        """Return the text of tokens; special tokens in `kept` are not skipped."""
        if kept and skip_special_tokens:
            tokens = [token for token in tokens if token in kept or token not in self._special_ids]
            skip_special_tokens = False
        return str(
            self._hugging_face.decode(
                list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def marker_ids(self, markers: tuple[str, ...]) -> frozenset[int]:
        """Return the special tokens that are markers in a text, or parts of one."""
        if markers not in self._marker_ids:
            added = self._hugging_face.added_tokens_decoder
            self._marker_ids[markers] = frozenset(
                token_id for token_id in self._special_ids if any(added[token_id].content in text for text in markers)
            )
        return self._marker_ids[markers]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character; empty for an unknown id."""
        piece = self._hugging_face.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id not in self._special_ids:
            if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
                return bytes([int(byte[1], 16)])
            if self._spells_bytes and _BYTE_OF.keys() >= set(piece):
                return bytes(_BYTE_OF[character] for character in piece)
        return self.decode([token_id], skip_special_tokens=False).encode()


def _decoder(hugging_face: Any) -> Any:
    """Return the description of a tokenizer's decoder from its file; null if it only joins tokens."""
    decoder = hugging_face.backend_tokenizer.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _byte_characters() -> dict[str, int]:
    """Return the characters that stand for bytes in the vocabularies of byte-level tokenizers (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
