"""The text of each token, by the model's own tokenizer file, so that transformers is not imported."""

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
    """Return a text for each token; where a character takes several, it is the last one's, and the others have none.

    The tokenizer is that of the first model, a folder or a name in the Hub's cache, that has one which can be read;
    without any, texts are numbers in brackets.
    """
    tokenizer = next(filter(None, map(_tokenizer, models)), None)
    if tokenizer is None:
        return [f"[{token_id}]" for token_id in ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token_id) or "" for token_id in ids]


def _tokenizer(model: str) -> Tokenizer | None:
    """Return a model's tokenizer, None if there is none; what lies elsewhere than in a folder is in the Hub's cache."""
    path = (Path(model) / _FILE).absolute()
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        found = None
        with contextlib.suppress(HFValidationError):  # it is no name of a model
            found = try_to_load_from_cache(model, _FILE)  # nothing is downloaded
        if not isinstance(found, str):
            return None
        path = Path(found)
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed_at: int) -> Tokenizer | None:
    from tokenizers import Tokenizer

    with contextlib.suppress(Exception):  # the library has no error of its own
        return Tokenizer.from_file(str(path))
    return None
