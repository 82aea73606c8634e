"""The losses, one module for each family, and `make_loss`, which makes a run's configured loss."""

from __future__ import annotations

import torch

from tandem.common.dotted import named
from tandem.config import Config
from tandem.config.schema.columns import Model
from tandem.trainer.losses.aggregate import Counts, Loss, LossClass, Report, aggregate
from tandem.trainer.losses.own import OwnLoss

__all__ = ["Counts", "Loss", "Report", "aggregate", "make_loss"]


def make_loss(config: Config, counts: Counts, device: torch.device, model: Model = "policy") -> Loss:
    """Return the configured loss of a model, for one optimizer step on a global batch with these counts."""
    if model == "policy" and config.loss_fn.class_path is not None:
        return OwnLoss(config, counts, device)
    (training,) = (each for each in config.declaration.trainings if each.model == model)
    make: LossClass = named(training.loss)
    return make(getattr(config, training.loss_section), counts, device)
