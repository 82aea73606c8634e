"""What all losses share: means over the global batch, and sums to report.

Every mean is over the whole global batch: the counts it divides by come from the batch before it was split over ranks
and micro-batches. So the sum of the micro-batches' losses is the loss, however the batch was split, and so is its
gradient.

Shapes: ``B`` rows, ``T`` padded positions.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import torch

from tandem.trainer.micro_batches import MicroBatch


class Counts(msgspec.Struct, frozen=True):
    """What the means of a global batch divide by."""

    tokens: int
    """Tokens that count in the loss."""
    sequences: int
    """Sequences with at least one such token."""
    positive_tokens: int = 0
    """Such tokens of sequences whose reward is above zero."""


def aggregate(values_BT: torch.Tensor, mask_BT: torch.Tensor, counts: Counts, *, token_level: bool) -> torch.Tensor:
    """Return what this micro-batch adds to the mean over the global batch.

    Token level: the mean over all counted tokens (DAPO, arXiv:2503.14476, equation 8). Sequence level: the mean over
    sequences of each one's mean over its tokens (GRPO, Shao et al. 2024, arXiv:2402.03300, equation 3).
    """
    masked_BT = torch.where(mask_BT, values_BT, 0.0)
    if token_level:
        return masked_BT.sum() / max(1, counts.tokens)
    return (masked_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).sum() / max(1, counts.sequences)


class Report:
    """Sums over what this rank has, from which step makes means over the global batch."""

    def __init__(self, names: tuple[str, ...], count: int, device: torch.device) -> None:
        self.names = names
        self.count = count
        """What the means divide by: as many tokens, or pairs, as count in the global batch."""
        self.sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        """In the order of `names`."""

    def add(self, mask: torch.Tensor, *values: torch.Tensor) -> None:
        """Add what counts of one micro-batch by `mask`: one tensor a name, of the mask's shape."""
        counted = [value.detach()[mask].sum(dtype=torch.float64) for value in values]
        assert len(counted) == len(self.names), "one tensor for each name"
        self.sums += torch.stack(counted)


class Loss(Protocol):
    """What a backend minimises: one object an optimizer step.

    Its class is called with what `LossClass` takes. The algorithm's declaration or ``loss_fn.class`` names it.
    """

    report: Report
    """Means to report beside the loss. A loss of the user's may have none."""

    def __call__(self, batch: MicroBatch, scores_BT: Any, /) -> torch.Tensor:
        """Return the micro-batch's share of the loss, a scalar.

        `scores_BT` are what the model in training says of its tokens, not read where `MicroBatch.loss_mask_BT` is
        False: `TokenScores` of the policy, `TokenValues` of a value model (`tandem.trainer.scoring`).
        """
        ...


class LossClass(Protocol):
    """What makes losses."""

    def __call__(self, settings: Any, counts: Counts, device: torch.device, **kwargs: Any) -> Loss:
        """Return the loss of one optimizer step.

        Args:
            settings: the section of the configuration that the algorithm's declaration names.
            counts: what the means of the step's global batch divide by.
            device: where the sums of the report belong.
            kwargs: ``loss_fn.kwargs``; none of the losses here takes any.

        """
        ...
