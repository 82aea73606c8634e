"""The words that no response may contain, as sequences of tokens."""

from __future__ import annotations

from tandem.common.errors import ConfigError, DataError
from tandem.config import Config
from tandem.samples.tokenizer import Tokenizer


def bad_token_ids(config: Config, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of tokens that no response may contain."""
    try:
        words = [tokenizer.spellings(word) for word in config.policy.generation.bad_words or ()]
    except DataError as error:
        raise ConfigError(f"policy.generation.bad_words: {error}") from None
    return tuple(dict.fromkeys(sequence for sequences in words for sequence in sequences))
