"""Stop strings: detect one in the text while tokens come one by one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers.decoders import DecodeStream

from tandem.common.errors import ModelError


class Detokenizer(NamedTuple):
    """A tokenizer, as far as it makes text of tokens."""

    tokenizer: tokenizers.Tokenizer
    special_tokens: tuple[str, ...]
    """Texts of its special tokens."""


def load_detokenizer(model_folder: Path) -> Detokenizer:
    """Load ``tokenizer.json`` of a model folder. Raises `ModelError` if there is none."""
    path = model_folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"stop strings need a tokenizer, and {path} does not exist")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    added = tokenizer.get_added_tokens_decoder().values()
    return Detokenizer(tokenizer, tuple(token.content for token in added if token.special))


class StopStrings:
    """A watcher of one response. The decoder holds back text until it is whole: a split UTF-8 character cannot
    match. Special tokens have no text, unless a stop string has one of them in it."""

    def __init__(self, detokenizer: Detokenizer, stop_strings: tuple[str, ...]) -> None:
        self._tokenizer = detokenizer.tokenizer
        self._stop_strings = stop_strings
        self._num_kept = max(len(stop_string) for stop_string in stop_strings) - 1
        names_special = any(
            token in stop_string for token in detokenizer.special_tokens for stop_string in stop_strings
        )
        self._stream = DecodeStream(skip_special_tokens=not names_special)
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Add a token; return whether a stop string is now complete."""
        text = self._stream.step(self._tokenizer, token_id)
        if not text:
            return False
        self._tail += text
        if any(stop_string in self._tail for stop_string in self._stop_strings):
            return True
        # No later match can begin further back than this.
        self._tail = self._tail[max(0, len(self._tail) - self._num_kept) :]
        return False
