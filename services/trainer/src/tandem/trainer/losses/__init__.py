"""The losses, one module a family, and `make_loss`, which makes the one that a run names."""

from __future__ import annotations

import torch

from tandem.common.config import Config
from tandem.common.dotted import named
from tandem.trainer.losses.aggregate import Counts, Loss, LossClass, Report, aggregate
from tandem.trainer.losses.own import OwnLoss

__all__ = ["Counts", "Loss", "Report", "aggregate", "make_loss"]


def make_loss(config: Config, counts: Counts, device: torch.device) -> Loss:
    """Return the configured loss, for one optimizer step on a global batch with these counts."""
    if config.loss_fn.class_path is not None:
        return OwnLoss(config, counts, device)
    make: LossClass = named(config.declaration.loss)
    return make(getattr(config, config.declaration.loss_section), counts, device)
