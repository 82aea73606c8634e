"""Describe the weights of a live vLLM model as slices of its checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tandem.common.errors import ModelError
from tandem.config.models.families import VLLM, VLLM_SEEING
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import locate
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.layout import Layout, PrivateMemory, Storage
from tandem.refit.weights import Weights, device_name, host_name


def weights_of(
    config: Mapping[str, Any],
    parameters: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    sizes: Vllm,
    rank: int,
    block: tuple[int, int] | None = None,
) -> Weights:
    """Describe the live parameters of one worker.

    Args:
        config: Hugging Face configuration of the model.
        parameters: by name, tied ones once. Bytes outside all tensors, such as padding of the vocabulary, become zero.
        dtype: of the weights, except those in float8.
        sizes: of the engine.
        rank: of the worker in it.
        block: rows and columns that share a scale, if the weights of linear layers are in float8.

    Raises:
        ModelError: the architecture is unknown, or the model has a parameter that a refit would not write.
        RefitError: the model lacks a parameter, or has it in another size.

    """
    known_types = (*VLLM, *VLLM_SEEING)
    if config.get("model_type") not in known_types:
        raise ModelError(f"vLLM's {config.get('model_type')} cannot be refitted; known are {', '.join(known_types)}")
    name_of_dtype = str(dtype).removeprefix("torch.")
    device = device_name(next(iter(parameters.values())).device)
    model = make_shape(config, name_of_dtype)
    layout = sizes.layout(model if block is None else model.quantised(block), rank, host_name(), device)
    storages = {name: Storage(name, parameter.nbytes, PrivateMemory()) for name, parameter in parameters.items()}
    located = locate(layout, storages)
    names = [storage.name for storage in located.storages]
    unwritten = sorted(parameters.keys() - set(names))
    if unwritten:
        raise ModelError(f"vLLM's {config['model_type']} has parameters that hold no tensor: {', '.join(unwritten)}")
    expected_dtypes = dtypes_of(located)
    for name in names:
        parameter = parameters[name]
        expected = expected_dtypes.get(name, dtype)  # padding alone has no tensor in it
        if parameter.dtype != expected or not parameter.is_contiguous():
            raise ModelError(
                f"vLLM has {name} as {parameter.dtype} with strides {parameter.stride()}, not plain {expected}"
            )
        parameter.data.zero_()
    return Weights(located, {name: parameters[name] for name in names})


def dtypes_of(layout: Layout) -> dict[str, torch.dtype]:
    """Return the element type of each storage."""
    storages, tensors = layout.pieces.storage_P.tolist(), layout.pieces.tensor_P.tolist()
    return {
        layout.storages[storage].name: getattr(torch, layout.tensors[tensor].dtype)
        for storage, tensor in zip(storages, tensors, strict=True)
    }
