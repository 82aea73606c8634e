"""Rollout routing replay in transformers' models: tokens go to the experts that the engine chose.

Routers score all experts as ever, and gates are what they make of the scores of those that are given
(`tandem.common.routers`): R3, Ma et al. 2025, arXiv:2510.11370, equation 8. Where nothing is given, the router chooses.

Shapes: ``B`` rows of ``T`` positions of a micro-batch, or one row of ``N`` tokens that its model takes; ``L`` layers,
``K`` experts a token.
"""

from __future__ import annotations

import torch

from tandem.common.routers import intercept


class RoutingReplay:
    """The routers of one model. Raises `ModelError` for a model that has none."""

    def __init__(self, model: torch.nn.Module, part: tuple[int, int] = (0, 1)) -> None:
        """Begin, with a model that is sharded already.

        `part`: of how many equal parts of each row its layers see which one, where ranks share the sequence between
        layers.
        """
        self._part = part
        self._experts: torch.Tensor | None = None
        intercept(model, self._given)

    def give(self, experts_BTLK: torch.Tensor | None) -> None:
        """Say where the tokens of the next forward pass go, and of the backward pass that may follow it.

        They are those that the model takes, -1 where it is to choose itself, as it does everywhere without any.
        """
        self._experts = experts_BTLK
        if experts_BTLK is not None and self._part[1] > 1:
            self._experts = experts_BTLK.chunk(self._part[1], dim=1)[self._part[0]]

    def _given(self, layer: int, own_NK: torch.Tensor) -> torch.Tensor:
        if self._experts is None:
            return own_NK
        given_NK = self._experts[:, :, layer].flatten(0, 1).to(own_NK.dtype)
        return torch.where(given_NK < 0, own_NK, given_NK)


def of_row(experts_BTLK: torch.Tensor, source_N: torch.Tensor) -> torch.Tensor:
    """Return the experts ``[1, N, L, K]`` of a row whose tokens are these of all positions; -1 where it has padding."""
    experts_NLK = experts_BTLK.flatten(0, 1)[source_N.clamp(min=0)]
    return experts_NLK.masked_fill((source_N < 0)[:, None, None], -1)[None]
