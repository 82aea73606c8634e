"""Low-rank adapters within a model of Transformers, through PEFT.

PEFT's layers replace those that they adapt. Elsewhere, tensors have the names of `tandem.config.models.lora`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from tandem.common.errors import ModelError
from tandem.config.models.lora import choose_layers, is_adapter, make_tensor_name
from tandem.config.models.vision_families import VISION
from tandem.config.schema.adapters import LoraCfg
from tandem.trainer.dropout import Dropout, DropoutPlace
from tandem.trainer.files.adapter_files import first_values, settings_of

_ADAPTER = "default"
"""PEFT's name of the only adapter."""
SECTION = "policy.dtensor_cfg.lora_cfg"


def inject(model: Any, adapters: LoraCfg, seed: int) -> list[str]:
    """Give layers of a whole model adapters in float32, freeze all else, and return the layers' names.

    A model that sees gets them in its language model alone.

    The first values depend only on the seed and the names. Raises `ConfigError` if no layer is chosen, and `ModelError`
    if PEFT cannot adapt one.
    """
    family = VISION.get(model.config.model_type)
    prefix = "" if family is None else family.language_prefix  # a tower has layers of the same names
    linear = [name for name in linear_layers(model) if name.startswith(prefix)]
    layers = choose_layers(linear, adapters, SECTION)
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(settings_of(adapters, [f"model.{layer}" for layer in layers]), _Holder(model))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{type(model).__name__} takes no adapters: {error}".split("\n")[0]) from error
    values = {}
    for name, parameter in parameters_of(model).items():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            values[name] = first_values(name, tuple(parameter.shape), adapters, seed)
    fill(model, values)
    return layers


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
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head
    ]


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
    # PEFT's own method would also freeze the parameters, and FSDP2 would keep that of the copies it makes of them.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
