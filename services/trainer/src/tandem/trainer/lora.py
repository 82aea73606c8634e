"""Low-rank adapters within a model of Transformers, through PEFT.

PEFT's layers replace linear layers that they adapt; routers and fused experts have parameters of their own. Elsewhere,
tensors have the names of `tandem.config.models.lora`.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from tandem.common.errors import ConfigError, ModelError
from tandem.config.models.families import find_language_prefix
from tandem.config.models.lora import choose_layers, count_projections, find_layer, is_adapter, make_tensor_name
from tandem.config.schema.adapters import LoraCfg
from tandem.trainer.dropout import Dropout, DropoutPlace
from tandem.trainer.files.adapter_files import AdapterDescription, FusedAdapter, first_values, settings_of

_ADAPTER = "default"
"""PEFT's name of the only adapter."""
SECTION = "policy.dtensor_cfg.lora_cfg"
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


def inject(model: Any, adapters: LoraCfg, seed: int, base: str) -> AdapterDescription:
    """Give layers of a whole model, which is called `base`, adapters in float32, freeze all else, and describe them.

    A vision model gets them in its language model alone.

    The first values depend only on the seed and the names. Raises `ConfigError` if no layer is chosen, or if an adapter
    of experts would drop inputs, and `ModelError` if PEFT cannot adapt a layer.
    """
    prefix = find_language_prefix(model.config.model_type)  # a tower has layers of the same names
    linear = linear_layers(model)
    routers, fused = list_routers(model), _list_fused(model)
    if adapters.patterns == ("*",):  # PEFT takes what is a linear layer in a checkpoint
        transposed = [name for name, adapter in fused.items() if adapter.is_transposed]
        fused = {name: adapter for name, adapter in fused.items() if name not in transposed}
        routers = [name for name in routers if not any(parameter.startswith(_parent(name)) for parameter in transposed)]
    candidates = [name for name in (*linear, *routers) if name.startswith(prefix)]
    layers = choose_layers(candidates, adapters, SECTION, [name for name in fused if name.startswith(prefix)])
    experts = tuple(
        msgspec.structs.replace(fused[name], rank=adapters.dim * count_projections(name, adapters))
        for name in layers
        if name in fused
    )
    model.requires_grad_(False)
    of_parameters = {name for name in layers if name in fused or name in routers}
    of_layers = [layer for layer in layers if layer not in of_parameters]
    if of_parameters and adapters.dropout:
        raise ConfigError(
            f"{SECTION}.dropout: {adapters.dropout:g}, but adapters of routed experts and routers, such as "
            f"{sorted(of_parameters)[0]}, drop nothing: leave them out with exclude_modules"
        )
    try:
        if of_layers:
            inject_adapter_in_model(settings_of(adapters, [f"model.{layer}" for layer in of_layers]), _Holder(model))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{type(model).__name__} takes no adapters: {error}".split("\n")[0]) from error
    _attach(model, adapters, experts, [name for name in layers if name in routers])
    described = AdapterDescription(
        base,
        adapters,
        [layer for layer in layers if layer not in fused],
        linear,
        has_experts(model),
        experts,
        tuple(fused),
        routers,
    )
    values, turned = {}, {adapter.parameter for adapter in experts if adapter.is_transposed}
    for name, parameter in parameters_of(model).items():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            values[name] = first_values(
                name, tuple(parameter.shape), adapters, seed, is_transposed=find_layer(name) in turned
            )
    fill(model, values)
    return described


def _list_fused(model: torch.nn.Module) -> dict[str, FusedAdapter]:
    """Return the fused parameters of a model's experts by name, in their order, without a rank yet."""
    return {
        f"{name}.{last}": FusedAdapter(f"{name}.{last}", len(weight), 0, is_transposed(module))
        for name, module in list_experts(model).items()
        for last, weight in list_parameters(module).items()
    }


def _parent(name: str) -> str:
    return name.rpartition(".")[0] + "."


def _attach(model: Any, adapters: LoraCfg, experts: Sequence[FusedAdapter], routers: Sequence[str]) -> None:
    """Give the parameters of experts, and the weights of routers, adapters of zeros."""
    ranks: dict[str, dict[str, int]] = {router: {"weight": adapters.dim} for router in routers}
    for adapter in experts:
        name, _, last = adapter.parameter.rpartition(".")
        ranks.setdefault(name, {})[last] = adapter.rank
    for name, of_parameters in ranks.items():
        ParameterAdapters(model.get_submodule(name), of_parameters, adapters.scale)


class _Holder(torch.nn.Module):
    """A wrapper that hides the kind of its model.

    In some models with routed experts, PEFT would take every ``gate_proj`` for one of the experts, which transformers
    has fused in one parameter, and adapt that.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


def has_experts(model: torch.nn.Module) -> bool:
    """Tell whether a model has routed experts, by the names of its parameters."""
    return any(".experts." in name for name, _ in model.named_parameters())


def linear_layers(model: Any) -> list[str]:
    """Return the names of a model's linear layers, without the output layer."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and _is_linear(module)
    ]


@torch.no_grad()
def _is_linear(layer: torch.nn.Linear) -> bool:
    """Tell whether a layer computes what its class does, unlike DeepSeek-V4's projection in groups and some routers."""
    if type(layer).forward is torch.nn.Linear.forward:
        return True
    inputs_BH = torch.ones(2, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    try:
        outputs = layer(inputs_BH)
    except (RuntimeError, TypeError):
        return False
    expected = torch.nn.functional.linear(inputs_BH, layer.weight, layer.bias)
    return isinstance(outputs, torch.Tensor) and outputs.shape == expected.shape and torch.allclose(outputs, expected)


@torch.no_grad()
def fill(model: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Copy whole tensors into the parameters of these names, in a model that is not sharded."""
    parameters = parameters_of(model)
    for name, tensor in values.items():
        parameters[name].copy_(tensor)


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters by the names that tensors have everywhere; its own names without adapters."""
    return {make_tensor_name(name): parameter for name, parameter in model.named_parameters()}


def add_dropout(model: Any, adapters: LoraCfg, place: DropoutPlace) -> None:
    """Let each adapter drop some of its inputs, or of its outputs, in training steps."""
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        dropout = Dropout(name, adapters.dropout, place)
        if adapters.dropout_position == "pre":
            layer.lora_dropout[_ADAPTER] = dropout
        else:
            second = layer.lora_B[_ADAPTER]
            second.dropout = dropout
            second.register_forward_hook(lambda module, _, output: module.dropout(output))


def dropouts_of(layer: torch.nn.Module) -> tuple[Dropout | None, Dropout | None]:
    """Return the dropouts of the inputs and the outputs of a layer's adapter, if there are any."""
    assert isinstance(layer, LoraLayer)
    before, behind = layer.lora_dropout[_ADAPTER], getattr(layer.lora_B[_ADAPTER], "dropout", None)
    return before if isinstance(before, Dropout) else None, behind


def matrices_of(layer: torch.nn.Module) -> tuple[torch.nn.Linear, torch.nn.Linear] | None:
    """Return the two matrices of a layer's adapter, as layers; None if it has no adapter."""
    if not isinstance(layer, LoraLayer):
        return None
    first, second = layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]
    assert isinstance(first, torch.nn.Linear)
    assert isinstance(second, torch.nn.Linear)
    return first, second


@contextmanager
def switched_off(model: torch.nn.Module) -> Iterator[None]:
    """Let the model compute as if it had no adapters, as long as the context lasts."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    of_parameters = list(list_adapters(model))
    # PEFT's own method would also freeze the parameters, and FSDP2 would keep that of the copies it makes of them.
    for layer in layers:
        layer._disable_adapters = True
    for adapters in of_parameters:
        adapters.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        for adapters in of_parameters:
            adapters.is_on = True
