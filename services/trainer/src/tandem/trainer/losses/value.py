"""The loss of a value model: the distance of its values from the returns.

Shapes: ``B`` rows, ``T`` padded positions.
"""

from __future__ import annotations

import torch

from tandem.config.schema import ValueLossFn
from tandem.trainer.losses import Counts, Report, aggregate
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import TokenValues


class ValueLoss:
    """Half the mean squared distance of values to returns over the valid tokens of the global batch, scaled.

    Let ``V'`` be a token's value before the first optimizer step on the rollout batch. With ``cliprange`` c, each token
    has the larger of its squared distance and that of ``clip(V, V' - c, V' + c)``. This is the clip that goes with
    PPO's (OpenAI's baselines; Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", 9).
    ``clip_fraction`` is the share of tokens that the clip decides.
    """

    NAMES = ("values", "returns", "clip_fraction")

    def __init__(self, settings: ValueLossFn, counts: Counts, device: torch.device) -> None:
        self._settings = settings
        self._counts = counts
        self.report = Report(self.NAMES, counts.tokens, device)

    def __call__(self, batch: MicroBatch, scores_BT: TokenValues) -> torch.Tensor:
        """Return the micro-batch's part of the loss."""
        values_BT, returns_BT, bound = scores_BT.values, batch.returns_BT, self._settings.cliprange
        losses_BT = (values_BT - returns_BT).square()
        is_clipped_BT = torch.zeros_like(losses_BT, dtype=torch.bool)
        if bound is not None:
            within_BT = values_BT.clamp(batch.values_BT - bound, batch.values_BT + bound)
            clipped_BT = (within_BT - returns_BT).square()
            is_clipped_BT = clipped_BT > losses_BT
            losses_BT = torch.maximum(losses_BT, clipped_BT)
        self.report.add(batch.loss_mask_BT, values_BT, returns_BT, is_clipped_BT)
        return 0.5 * self._settings.scale * aggregate(losses_BT, batch.loss_mask_BT, self._counts, token_level=True)
