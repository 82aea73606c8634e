"""The losses, one module for each family, and `make_loss`, which makes a run's configured loss."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tandem.common.dotted import named
from tandem.config import Config
from tandem.config.schema.columns import Model
from tandem.trainer.losses.aggregate import Counts, Loss, LossClass, Report, aggregate
from tandem.trainer.losses.custom import CustomLoss

__all__ = ["Counts", "Loss", "Report", "aggregate", "make_loss"]

_loss_class: Callable[[str], LossClass] = functools.cache(named)


def make_loss(config: Config, counts: Counts, device: torch.device, model: Model = "policy") -> Loss:
    """Return the configured loss of a model, for one optimizer step on a global batch with these counts."""
    if model == "policy" and config.loss_fn.class_path is not None:
        return CustomLoss(config, counts, device)
    training = config.declaration.training_of[model]
    return _loss_class(training.loss)(getattr(config, training.loss_section), counts, device)
