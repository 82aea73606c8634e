"""The policy that training starts from, where adapters are trained: the model with those for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from tandem.trainer import exposed_weights


@contextmanager
def exchanged(tensors: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Let tensors have the values of others, in their own memory, as long as the context lasts.

    No engine may read them meanwhile: it is for a training step, in which they change anyway.
    """
    values = [tensor.clone() for tensor in tensors]
    for tensor, replacement in tensors.items():
        tensor.copy_(replacement)
    try:
        yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def as_at_the_start(
    model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], start: Mapping[str, torch.Tensor] | None
) -> AbstractContextManager[None]:
    """Let a model compute as the policy that training starts from, as long as the context lasts.

    `start` is this rank's part of the adapters that training starts from; without any they are switched off.
    """
    if start is None:
        from tandem.trainer import lora

        return lora.switched_off(model)
    return exchanged({exposed_weights.local_of(parameters[name]): tensor for name, tensor in start.items()})


def shards_of(
    parameters: Mapping[str, torch.nn.Parameter], whole_tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's part of whole tensors, of the parameters of these names."""
    return {
        name: tensor[exposed_weights.box_of(parameters[name]).region].clone().to(parameters[name].device)
        for name, tensor in whole_tensors.items()
    }
