"""The algorithms: what they ask of engines and trainers, and the numbers in between. numpy only."""

from __future__ import annotations

from tandem.common.config import Config
from tandem.common.tokenizer import Tokenizer
from tandem.coordinator.algorithms.dpo import DpoFeed
from tandem.coordinator.algorithms.grpo import GrpoFeed
from tandem.coordinator.algorithms.sft import SftFeed
from tandem.coordinator.feed import Feed

__all__ = ["make_feed"]


def make_feed(config: Config, tokenizer: Tokenizer) -> Feed:
    """Load the data of the configured algorithm. Raises `DataError` or `ConfigError` before anything starts."""
    match config.algorithm:
        case "grpo":
            return GrpoFeed(config, tokenizer)
        case "sft":
            return SftFeed(config, tokenizer)
        case "dpo":
            return DpoFeed(config, tokenizer)
