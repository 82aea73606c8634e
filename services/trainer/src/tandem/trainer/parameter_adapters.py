"""Low-rank adapters of parameters that are not weights of linear layers: of experts and routers.

Experts that Transformers has fused, ``[experts, rows, columns]``, have a pair of matrices each, in two parameters of
the same module: ``gate_up_proj_lora_A`` of shape ``[experts, rank, columns]`` and ``gate_up_proj_lora_B`` of shape
``[experts, rows, rank]``. All of a module's parameters then count experts in their first dimension, so that ranks share
them out, and shard them, like the experts. A router's are ``weight_lora_A`` and ``weight_lora_B``.

The module computes with ``weight + scale * B @ A``, made anew in each pass as PEFT's ``ParamWrapper`` does. Where a
module has weights as ``[experts, in, out]`` (``is_transposed``, as GPT-OSS), rows are inputs: ``B`` is what PEFT calls
``lora_A``, transposed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_EXPERTS_DIMS = 3
_MISSING = object()


def list_experts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of a model that hold the fused experts of a layer, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and list_parameters(module)
    }


def list_parameters(experts: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of experts in a module, by their names there and in its order; not their biases."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() == _EXPERTS_DIMS and not name.endswith(("_lora_A", "_lora_B"))
    }


def is_transposed(experts: torch.nn.Module) -> bool:
    """Tell whether the weights of experts have a row for each input."""
    return bool(getattr(experts, "is_transposed", False))


def list_routers(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that choose among experts, unless they are plain linear layers."""
    routers = []
    for name in list_experts(model):
        prefix = name.removesuffix("experts")
        for last in ("gate", "router"):
            try:
                module = model.get_submodule(f"{prefix}{last}")
            except AttributeError:
                continue
            weight = getattr(module, "weight", None)
            if not isinstance(module, torch.nn.Linear) and isinstance(weight, torch.Tensor) and weight.dim() == 2:
                routers.append(f"{prefix}{last}")
    return routers


class ParameterAdapters:
    """The adapters of one module's parameters."""

    def __init__(self, module: torch.nn.Module, ranks: Mapping[str, int], scale: float) -> None:
        """Give parameters of `module` adapters of these ranks, in float32 and of zeros."""
        self.is_on = True
        self._names, self._scale = tuple(ranks), scale
        for name, rank in ranks.items():
            weight = getattr(module, name)
            *leading, rows, columns = weight.shape
            for kind, shape in ("A", (rank, columns)), ("B", (rows, rank)):
                matrix = torch.zeros(*leading, *shape, dtype=torch.float32, device=weight.device)
                module.register_parameter(f"{name}_lora_{kind}", torch.nn.Parameter(matrix))
        attached: Any = module
        attached.parameter_adapters = self
        attached.forward = functools.partial(self._run, module, module.forward)

    def _run(self, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module with its parameters as the adapters change them."""
        if not self.is_on:
            return forward(*args, **kwargs)
        # An attribute of the instance hides the parameter of the same name. Tensor parallelism hides it as well.
        hidden = vars(module)
        before = {name: hidden.get(name, _MISSING) for name in self._names}
        hidden.update({name: self._adapted(module, name) for name in self._names})
        try:
            return forward(*args, **kwargs)
        finally:  # recomputation stops a forward pass in its middle
            for name, value in before.items():
                if value is _MISSING:
                    del hidden[name]
                else:
                    hidden[name] = value

    def _adapted(self, module: torch.nn.Module, name: str) -> torch.Tensor:
        weight, a, b = (getattr(module, attribute) for attribute in (name, f"{name}_lora_A", f"{name}_lora_B"))
        # In PEFT's order of operations, which is another for a single matrix.
        if weight.dim() == _EXPERTS_DIMS:
            adapted: torch.Tensor = torch.baddbmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=self._scale)
        else:
            adapted = weight + ((b @ a) * self._scale).to(weight.dtype)
        return adapted


def list_adapters(model: torch.nn.Module) -> Iterator[ParameterAdapters]:
    """Yield the adapters of all modules of a model."""
    for module in model.modules():
        adapters = getattr(module, "parameter_adapters", None)
        if isinstance(adapters, ParameterAdapters):
            yield adapters
