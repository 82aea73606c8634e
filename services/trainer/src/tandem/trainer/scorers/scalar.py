"""The scorer of value models and reward models."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tandem.trainer.models import scalar_head
from tandem.trainer.scorers.scorer import HeadTask, ModelScorer
from tandem.trainer.scores import Scores, TokenValues


class ScalarScorer(ModelScorer):
    """The values of tokens: the output of `scalar_head` for the hidden state that predicts each."""

    def __init__(self, model: Any, *, context: dist.ProcessGroup | None = None) -> None:
        """Begin, as any scorer."""
        super().__init__(model, scalar_head(model), context)

    def _scores(self, inputs: dict[str, Any], task: HeadTask) -> Scores:
        return TokenValues(self.model(**inputs, use_cache=False).logits[:, 0].float())
