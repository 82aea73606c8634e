"""Low-rank adapters of Megatron-Core's linear layers, over tensor-parallel ranks.

A layer split along its rows (``linear_qkv``, ``linear_fc1``) has a whole ``lora_A`` on every rank, and the rank's rows
of ``lora_B``. A layer split along its columns (``linear_proj``, ``linear_fc2``) has the rank's columns of ``lora_A``,
and a whole ``lora_B``. Ranks exchange only the small activations between the two matrices. If activations are split
along the sequence, whole matrices get gradients of a rank's own tokens. Megatron-Core then sums them as it does for
norms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings

from tandem.common.errors import CheckpointError, ModelError
from tandem.config.models.lora import A, B, choose_layers
from tandem.config.schema.adapters import PeftConfig
from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.adapters.geometry import LatentAttention
from tandem.trainer.files.adapter_files import first_values

SECTION = "policy.megatron_cfg.peft"
_BY_ROWS = ("linear_qkv", "linear_fc1")


def layers_with_adapters(
    linear: Mapping[str, tuple[str, ...]], model: ModelShape, adapters: PeftConfig
) -> dict[str, tuple[str, ...]]:
    """Return those of a model's `linear` layers with adapters, by Megatron-Core's names, each with its layers in a
    checkpoint.

    Raises `ConfigError` if none is chosen, and `ModelError` if a chosen layer cannot have an adapter here.
    """
    if isinstance(model.as_text.required_geometry.attention, LatentAttention):
        raise ModelError(f"{SECTION}: adapters of latent attention are not built")
    layers = {layer: linear[layer] for layer in choose_layers(list(linear), adapters, SECTION)}
    for layer, parts in layers.items():
        if not parts:
            raise ModelError(
                f"{SECTION}: adapters of routed experts ({layer}) are not built: leave them out with exclude_modules: "
                '["*.mlp.experts.*"]'
            )
    return layers


def new_values(
    shapes: Mapping[str, tuple[int, ...]], layers: Mapping[str, Sequence[str]], adapters: PeftConfig, seed: int
) -> dict[str, torch.Tensor]:
    """Return the first values of adapters by the names of a checkpoint. They depend only on the seed and the names."""
    values = {}
    for layer, parts in layers.items():
        # Values that several layers of a checkpoint share are drawn once, by the name that they have here.
        shared = first_values(f"{layer if len(parts) > 1 else parts[0]}.{A}", shapes[f"{parts[0]}.{A}"], adapters, seed)
        for part in parts:
            values[f"{part}.{A}"] = shared
            values[f"{part}.{B}"] = first_values(f"{part}.{B}", shapes[f"{part}.{B}"], adapters, seed)
    return values


def as_fused(values: dict[str, torch.Tensor], layers: Mapping[str, Sequence[str]]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's adapters for the fused layers here.

    Raises `CheckpointError` if layers that Megatron-Core fuses have different ``lora_A``.
    """
    for layer, (first, *other_parts) in layers.items():
        for part in other_parts:
            if not torch.equal(values[f"{first}.{A}"], values[f"{part}.{A}"]):
                raise CheckpointError(
                    f"{layer} has one lora_A for all that it fuses, and those of {first} and {part} differ: the "
                    "adapters were not trained with Megatron-Core"
                )
    return values


class AdapterMatrix(torch.nn.Module):
    """One of the two matrices of an adapter, as this rank has it."""

    def __init__(self, like: torch.Tensor, shape: Sequence[int], *, is_cut: bool, sums: bool) -> None:
        """Begin with zeros.

        Args:
            like: a parameter of the same dtype on the same device.
            shape: shape on this rank.
            is_cut: whether other tensor-parallel ranks have other parts of it.
            sums: whether each of them has the gradient of only some tokens.
        """
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(tuple(shape), dtype=like.dtype, device=like.device))
        # Attributes that Megatron-Core reads, for the norm of all gradients and to sum those of whole parameters.
        marks: Any = self.weight
        marks.tensor_model_parallel, marks.sequence_parallel = is_cut, sums


def adapt(chunk: Any, layers: Mapping[str, Sequence[str]], adapters: PeftConfig) -> None:
    """Freeze a chunk, and give adapters, without values yet, to its linear layers in `layers`."""
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        prefix = f"decoder.layers.{layer.layer_number - 1}."
        for name, module in list(layer.named_modules()):
            if prefix + name in layers:
                _attach(module, name.rpartition(".")[2] in _BY_ROWS, chunk.config, adapters)
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(_require_gradient)


def _attach(module: Any, by_rows: bool, config: Any, adapters: PeftConfig) -> None:
    num_out, num_in = module.weight.shape  # of this rank
    is_split = bool(config.sequence_parallel)
    matrix = functools.partial(AdapterMatrix, module.weight)
    module.lora_A = matrix((adapters.dim, num_in), is_cut=not by_rows, sums=by_rows and is_split)
    module.lora_B = matrix((num_out, adapters.dim), is_cut=by_rows, sums=not by_rows and is_split)
    module.adapts = True
    product = _multiply_by_rows if by_rows else _multiply_by_columns
    module.forward = functools.partial(
        _forward, module, module.forward, functools.partial(product, is_split=is_split), adapters.scale
    )


def _forward(module: Any, forward: Any, product: Any, scale: float, hidden: torch.Tensor, *args: Any, **kw: Any) -> Any:
    """Return a layer's output and bias, with the adapter's part added to the output."""
    output, bias = forward(hidden, *args, **kw)
    if not module.adapts:
        return output, bias
    norm = getattr(module, "layer_norm_weight", None)
    if norm is not None:  # Transformer Engine's layer includes the norm before it
        hidden = F.rms_norm(hidden, norm.shape, norm, module.eps)
    return output + product(hidden, module.lora_A.weight, module.lora_B.weight) * scale, bias


def _multiply_by_rows(hidden: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, is_split: bool) -> torch.Tensor:
    """Multiply inputs, whole or split along the sequence, into this rank's rows of all tokens."""
    low = F.linear(hidden, a)
    gather = (
        mappings.gather_from_sequence_parallel_region if is_split else mappings.copy_to_tensor_model_parallel_region
    )
    return F.linear(gather(low), b)


def _multiply_by_columns(hidden: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, is_split: bool) -> torch.Tensor:
    """Multiply this rank's columns into outputs, whole or split along the sequence."""
    low = F.linear(hidden, a)
    if is_split:
        low = mappings.reduce_scatter_to_sequence_parallel_region(low)
    else:
        low = mappings.reduce_from_tensor_model_parallel_region(low)
    return F.linear(low, b)


def _require_gradient(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Let recomputed layers go backward, though nothing before the first of them is trained."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


@contextmanager
def switched_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let chunks compute as if they had no adapters, as long as the context lasts."""
    layers: list[Any] = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "adapts")]
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True
