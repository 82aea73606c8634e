"""The texts of tokens, by a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
