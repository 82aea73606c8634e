"""The loss of supervised fine-tuning."""

from __future__ import annotations

import torch

from tandem.trainer.losses.aggregate import Counts, Report, aggregate
from tandem.trainer.packing import MicroBatch


class NegativeLogLikelihood:
    """Supervised fine-tuning: the mean negative log-probability of the counted tokens of the global batch."""

    NAMES = ("entropy",)

    def __init__(self, counts: Counts, device: torch.device) -> None:
        self._counts = counts
        self.report = Report(self.NAMES, counts.tokens, device)

    def __call__(self, batch: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
        """Return the micro-batch's share of the loss."""
        self.report.add(batch.loss_mask_BT, entropy_BT)
        return aggregate(-logprobs_BT, batch.loss_mask_BT, self._counts, token_level=True)
