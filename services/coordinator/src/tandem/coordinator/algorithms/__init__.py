"""The algorithms: what they ask of engines and trainers, and the numbers in between. numpy only."""

from __future__ import annotations

from tandem.common.config import Config
from tandem.common.dotted import named
from tandem.common.tokenizer import Tokenizer
from tandem.coordinator.feed import Feed

__all__ = ["make_feed"]


def make_feed(config: Config, tokenizer: Tokenizer) -> Feed:
    """Load the data of the configured algorithm. Raises `DataError` or `ConfigError` before anything starts."""
    feed: Feed = named(config.declaration.batches)(config, tokenizer)
    return feed
