"""Means over a batch that some users of TRL and verl are used to, beside those of NeMo-RL.

Shapes: ``B`` rows, ``T`` padded positions.
"""

from __future__ import annotations

import torch

from tandem.config.schema import LossFn
from tandem.trainer.losses import Counts


def aggregate(values_BT: torch.Tensor, mask_BT: torch.Tensor, counts: Counts, settings: LossFn) -> torch.Tensor:
    """Return this micro-batch's part of ``loss_fn.loss_type``, a scalar.

    * ``dr_grpo``: the sum over tokens, divided by the sequences of the global batch and by a constant length (Liu et
    al. 2025, arXiv:2503.20783, section 3.2 and listing 1). A long sequence then counts more, in proportion.
    * ``bnpo``: the mean over the micro-batch's tokens, weighted by its share of the sequences (TRL 1.16,
    ``GRPOTrainer._compute_loss``, whose micro-batches have equally many). With micro-batches of one sequence it is
    GRPO's mean, with one micro-batch DAPO's.
    """
    total = torch.where(mask_BT, values_BT, 0.0).sum()
    num_sequences = max(1, counts.sequences)
    if settings.loss_type == "dr_grpo":
        assert settings.loss_scale_factor is not None, "the configuration derives it"
        return total / (num_sequences * settings.loss_scale_factor)
    return total / mask_BT.sum().clamp(min=1) * (mask_BT.any(dim=1).sum() / num_sequences)
