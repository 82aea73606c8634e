"""The losses, one module a family; `make_loss` chooses."""

from __future__ import annotations

import torch

from tandem.common.config import Config
from tandem.trainer.losses.aggregate import Counts, Loss
from tandem.trainer.losses.policy_gradient import PolicyGradientLoss
from tandem.trainer.losses.preference import PreferenceLoss
from tandem.trainer.losses.supervised import NegativeLogLikelihood

__all__ = ["Counts", "Loss", "make_loss"]


def make_loss(config: Config, counts: Counts, device: torch.device) -> Loss:
    """Return the configured loss, for one optimizer step on a global batch with these counts."""
    match config.algorithm:
        case "grpo":
            return PolicyGradientLoss(config.loss_fn, counts, device)
        case "sft":
            return NegativeLogLikelihood(counts, device)
        case "dpo":
            return PreferenceLoss(config.dpo, counts, device)
