"""Expert routing in the embedded engine: the experts that routers chose in its last forward pass.

Shapes: ``N`` tokens of a pass, ``L`` layers, ``K`` experts a token, ``X`` bytes of the column of samples.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.errors import ModelError
from tandem.common.routers import intercept
from tandem.rollout.engines.attention import SlotPrompt
from tandem.rollout.engines.slots import EngineSlots
from tandem.samples.routed_experts import Bytes, RoutedExperts


class RoutingRecord:
    """Listener to the routers of one model. Raises `ModelError` for a model without routers."""

    def __init__(self, model: torch.nn.Module, experts: RoutedExperts) -> None:
        """Begin to listen; `experts` describe the routing that samples of the model carry for each token."""
        if "forward" in vars(model):  # `tandem.rollout.engines.own_caches`: in several passes a step
            raise ModelError("router replay needs a model that runs in slots, not one with a cache of its own")
        self._experts = experts
        self._chosen: dict[int, torch.Tensor] = {}
        """Experts chosen by each layer, ``[N, K]``."""
        intercept(model, self._note)

    def take(self) -> Bytes:
        """Return the routing column of the tokens of the last pass."""
        first_NK = next(iter(self._chosen.values()))
        size = len(first_NK), self._experts.num_layers, self._experts.top_k
        experts_NLK = torch.full(size, -1, dtype=torch.int32, device=first_NK.device)
        for layer, chosen_NK in self._chosen.items():
            experts_NLK[:, layer] = chosen_NK
        self._chosen.clear()
        return self._experts.encode(experts_NLK.cpu().numpy())

    def note(self, slots: EngineSlots, position_R: NDArray[np.int64], prompts: Iterable[SlotPrompt]) -> None:
        """Note the routing of the last pass's tokens: one of each running slot, and the prompts behind them."""
        num, routed_experts_NX = len(position_R), self.take()
        slots.routed_experts_SLX[np.arange(num), position_R] = routed_experts_NX[:num]
        for prompt in prompts:
            its_slots = slice(prompt.first_slot, prompt.first_slot + prompt.num_slots)
            its_LX = routed_experts_NX[prompt.start : prompt.start + prompt.length]
            slots.routed_experts_SLX[its_slots, : prompt.length] = its_LX

    def _note(self, layer: int, chosen_NK: torch.Tensor) -> torch.Tensor:
        self._chosen[layer] = chosen_NK
        return chosen_NK
