"""Routers of mixture-of-experts models in Transformers: observe or replace the experts they choose.

A router chooses experts with one call of ``torch.topk`` over the scores of all experts. Only the result of that call
is replaced; the router does the rest of the arithmetic itself. So it computes the gates of the replacement experts
from its own scores, and gradients flow as usual.

Shapes: ``N`` tokens, ``K`` experts per token.
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
"""A function from a layer's number and the experts ``[N, K]`` chosen by its router to the experts to use."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROUTER = re.compile(r"Top[Kk]Router$")


def intercept(model: torch.nn.Module, choose: Choose) -> tuple[int, ...]:
    """Have `choose` select each token's experts in every later forward pass of a model; return the model's MoE
    layers.

    Raises `ModelError` for a model without such routers.
    """
    routers = _find_routers(model)
    for layer, router in routers.items():
        router.forward = functools.partial(_compute_route, router, router.forward, functools.partial(choose, layer))
    return tuple(routers)


def _find_routers(model: torch.nn.Module) -> dict[int, Any]:
    routers = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if layer is not None and _ROUTER.search(type(module).__name__):
            routers[int(layer[1])] = module
    if not routers:
        raise ModelError(f"{type(model).__name__} has no Transformers-style routers, so no choices to replay")
    return routers


def _compute_route(
    router: Any, forward: Callable[..., Any], choose: Callable[[torch.Tensor], torch.Tensor], *args: Any
) -> Any:
    with _Choice(router.num_experts, router.top_k, choose) as choice:
        routed = forward(*args)
    if choice.num_made != 1:
        raise ModelError(
            f"{type(router).__name__} chooses experts in {choice.num_made} calls of torch.topk instead of one"
        )
    return routed


class _Choice(TorchFunctionMode):
    """A mode that replaces the result of the call that chooses experts."""

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
        # Routers that first choose among groups of experts do so with other sizes, or on scores by group.
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[1:] != (self._num_experts,):
            return result
        own_NK = result.indices
        if own_NK.shape[1] != self._top_k:
            return result
        self.num_made += 1
        chosen_NK = self._choose(own_NK)
        return result if chosen_NK is own_NK else (args[0].gather(1, chosen_NK), chosen_NK)
