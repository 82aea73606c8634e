"""The algorithms: prompts for engines, batches for trainers, and the numbers in between. numpy only."""

from __future__ import annotations

from tandem.common.user_code import named
from tandem.config import Config
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.samples.tokenizer import Tokenizer

__all__ = ["make_algorithm"]

_RECORDED = "tandem.coordinator.algorithms.recorded.RecordedAlgorithm"


def make_algorithm(config: Config, tokenizer: Tokenizer) -> RunningAlgorithm:
    """Load the data of the configured algorithm. Raises `DataError` or `ConfigError` before anything starts."""
    running = config.declaration.running if config.replay is None else _RECORDED
    algorithm: RunningAlgorithm = named(running)(config, tokenizer)
    return algorithm
