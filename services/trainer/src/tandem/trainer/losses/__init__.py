"""The losses, one module a family; `make_loss` makes that which the algorithm declares or ``loss_fn.class`` names."""

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
