"""The loss of supervised fine-tuning."""

from __future__ import annotations

import torch

from tandem.config.schema import SftConfig
from tandem.trainer.losses import Counts, Report, aggregate
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import TokenScores


class NegativeLogLikelihood:
    """The mean negative log-probability of the valid tokens of the global batch.

    ``token_accuracy`` is the share of these tokens that are the likeliest ones given the tokens before them.
    """

    NAMES = ("entropy", "token_accuracy")

    def __init__(self, settings: SftConfig, counts: Counts, device: torch.device) -> None:
        self._counts = counts
        self.report = Report(self.NAMES, counts.tokens, device)

    def __call__(self, batch: MicroBatch, scores_BT: TokenScores) -> torch.Tensor:
        """Return the micro-batch's part of the loss."""
        self.report.add(batch.loss_mask_BT, scores_BT.entropy, scores_BT.is_likeliest)
        return aggregate(-scores_BT.logprobs, batch.loss_mask_BT, self._counts, token_level=True)
