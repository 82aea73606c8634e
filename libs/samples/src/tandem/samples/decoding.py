"""The texts and bytes of tokens, by a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.samples.token_bytes import Spellings


class Decoder:
    """A Hugging Face tokenizer, as far as it reads tokens."""

    def __init__(self, hugging_face: Any) -> None:
        """Wrap a tokenizer."""
        self._hugging_face = hugging_face
        added = hugging_face.added_tokens_decoder
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._spellings: Spellings | None = None
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
            from tandem.samples.token_bytes import Spellings

            self._spellings = Spellings(self._hugging_face)
        if (content := self._added.get(token_id)) is not None:
            return (content if token_id in self._special_ids else self._spellings.with_spaces(content)).encode()
        spelt = self._spellings.of(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode() if spelt is None else spelt

    def token_text(self, token_id: int) -> str:
        """Return the text of a token within a text; a part of a character is shown as such."""
        return self.token_bytes(token_id).decode(errors="replace")
