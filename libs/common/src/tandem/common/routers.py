"""The routers of mixtures of experts in transformers: what they choose can be seen, and replaced.

A router ends its choice with one call of ``torch.topk`` over the scores of all experts. What that call returns is
replaced; everything around it, the gates above all, stays the router's own arithmetic. So gates are computed of its own
scores for the experts that the tokens go to, and gradients flow as ever.

Shapes: ``N`` tokens, ``K`` experts a token.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tandem.common.errors import ModelError

Choose = Callable[[int, torch.Tensor], torch.Tensor]
"""From the number of a layer and the experts ``[N, K]`` that its router has chosen to those that the tokens go to."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROUTER = re.compile(r"Top[Kk]Router$")


def intercept(model: torch.nn.Module, choose: Choose) -> tuple[int, ...]:
    """Have `choose` decide where the tokens of a model go, in every forward pass from now on; return its layers.

    Raises `ModelError` for a model without routers of this kind.
    """
    routers = _routers_of(model)
    for layer, router in routers.items():
        router.forward = functools.partial(_route, router, router.forward, functools.partial(choose, layer))
    return tuple(routers)


def _routers_of(model: torch.nn.Module) -> dict[int, Any]:
    found = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if layer is not None and _ROUTER.search(type(module).__name__):
            found[int(layer[1])] = module
    if not found:
        raise ModelError(f"{type(model).__name__} has no routers of transformers' kind, whose choice could be replayed")
    return found


def _route(router: Any, forward: Callable[..., Any], choose: Callable[[torch.Tensor], torch.Tensor], *args: Any) -> Any:
    with _Choice(router.num_experts, router.top_k, choose) as choice:
        routed = forward(*args)
    if choice.num_made != 1:
        raise ModelError(
            f"{type(router).__name__} chooses experts in {choice.num_made} calls of torch.topk, not in one"
        )
    return routed


class _Choice(TorchFunctionMode):
    """Gives the call that chooses experts another result."""

    def __init__(self, num_experts: int, top_k: int, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._num_experts, self._top_k, self._choose = num_experts, top_k, choose
        self.num_made = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Routers that first choose among groups of experts do that by other numbers, or of scores by group.
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[1:] != (self._num_experts,):
            return result
        own_NK = result.indices
        if own_NK.shape[1] != self._top_k:
            return result
        self.num_made += 1
        chosen_NK = self._choose(own_NK)
        return result if chosen_NK is own_NK else (args[0].gather(1, chosen_NK), chosen_NK)
