"""Texts of tokens, from the model's own tokenizer file, without importing transformers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"


def texts_of(models: Sequence[str], ids: Sequence[int]) -> list[str]:
    """Return a text for each token; a character of several tokens is given to the last one, and the others are empty.

    The tokenizer is that of the first model with a readable one; a model is a folder or a name in the Hub's cache.
    Without a tokenizer, texts are numbers in brackets.
    """
    tokenizer = next(filter(None, map(_tokenizer, models)), None)
    if tokenizer is None:
        return [f"[{token_id}]" for token_id in ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token_id) or "" for token_id in ids]


def _tokenizer(model: str) -> Tokenizer | None:
    """Return a model's tokenizer, from a folder or else the Hub's cache; None if there is none."""
    path = (Path(model) / _FILE).absolute()
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        cached_path = None
        with contextlib.suppress(HFValidationError):  # not a name of a model
            cached_path = try_to_load_from_cache(model, _FILE)  # downloads nothing
        if not isinstance(cached_path, str):
            return None
        path = Path(cached_path)
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed_at: int) -> Tokenizer | None:
    from tokenizers import Tokenizer

    with contextlib.suppress(Exception):  # the library has no error class of its own
        return Tokenizer.from_file(str(path))
    return None
