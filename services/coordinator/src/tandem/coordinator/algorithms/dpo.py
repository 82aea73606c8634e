"""DPO's data: prompts with a better and a worse response.

`tandem.trainer.losses.preference` has the loss.
"""

from __future__ import annotations

from tandem.common.config import Config
from tandem.common.tokenizer import Tokenizer
from tandem.coordinator.algorithms.given import GivenFeed


class DpoFeed(GivenFeed):
    """Two sequences for each pair, the chosen one first; ``train_global_batch_size`` counts pairs, as in NeMo-RL."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        super().__init__(config, config.dpo, tokenizer)
