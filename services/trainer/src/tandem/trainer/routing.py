"""Rollout routing replay in Transformers' models: tokens go to the experts that the engine chose.

Routers score all experts as usual, and compute gates from the scores of the given experts (`tandem.common.routers`):
R3, Ma et al. 2025, arXiv:2510.11370, equation 8. For tokens without given experts, the router chooses.

Shapes: ``B`` rows of ``T`` positions of a micro-batch, or one row of ``N`` tokens that its model takes; ``L`` layers,
``K`` experts a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tandem.common.routers import intercept
from tandem.trainer.context import sources_of_share
from tandem.trainer.micro_batches import MicroBatch


class RoutingReplay:
    """The routers of one model. Raises `ModelError` for a model that has none."""

    def __init__(self, model: torch.nn.Module, part: tuple[int, int] = (0, 1)) -> None:
        """Take a model that is already sharded.

        `part` has the index and the number of the equal parts of each row, if ranks share the sequence between layers.
        """
        self._part = part
        self._experts: torch.Tensor | None = None
        intercept(model, self._replay)

    def give(self, experts_BTLK: torch.Tensor | None) -> None:
        """Set the experts of the tokens in the next forward pass, and in the backward pass that may follow it.

        They are for the tokens that the model takes, -1 where it chooses itself. With None it chooses everywhere.
        """
        self._experts = experts_BTLK
        if experts_BTLK is not None and self._part[1] > 1:
            self._experts = experts_BTLK.chunk(self._part[1], dim=1)[self._part[0]]

    def _replay(self, layer: int, own_NK: torch.Tensor) -> torch.Tensor:
        if self._experts is None:
            return own_NK
        given_NK = self._experts[:, :, layer].flatten(0, 1).to(own_NK.dtype)
        return torch.where(given_NK < 0, own_NK, given_NK)


def experts_of(batch: MicroBatch, context: dist.ProcessGroup | None) -> torch.Tensor | None:
    """Return the experts of the tokens that a model takes of a micro-batch; None if they are unknown for all.

    `context` are the ranks that share each sequence with this one.
    """
    experts_BTLK, row = batch.routed_experts_BTLK, batch.row
    if experts_BTLK is None:
        return None
    if context is not None:
        return of_row(experts_BTLK, sources_of_share(batch, context))
    return experts_BTLK if row is None else of_row(experts_BTLK, row.source_N)


def of_row(experts_BTLK: torch.Tensor, source_N: torch.Tensor) -> torch.Tensor:
    """Return the experts ``[1, N, L, K]`` of a row with tokens from these positions; -1 in the padding."""
    experts_NLK = experts_BTLK.flatten(0, 1)[source_N.clamp(min=0)]
    return experts_NLK.masked_fill((source_N < 0)[:, None, None], -1)[None]
