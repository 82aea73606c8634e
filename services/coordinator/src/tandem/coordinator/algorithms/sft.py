"""SFT's data: worked solutions, and conversations."""

from __future__ import annotations

from tandem.common.config import Config
from tandem.common.tokenizer import Tokenizer
from tandem.coordinator.algorithms.given import GivenFeed


class SftFeed(GivenFeed):
    """A sequence for each conversation; ``train_global_batch_size`` counts them."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        super().__init__(config, config.sft, tokenizer)
