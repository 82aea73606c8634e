"""The modules of a chunk's layers: Transformer Engine's if it is installed, or torch's own.

A model may have dense layers and layers with experts. Each chunk gets the specifications of only its layers.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tandem.trainer.backends.megatron.attention import AttentionNorm, CoreAttention
from tandem.trainer.backends.megatron.preparing import HAS_TRANSFORMER_ENGINE, has_kernels


def layers_of(transformer: TransformerConfig, biased: Set[str], stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this rank's chunk.

    Args:
        transformer: configuration of the whole model. Its ``moe_layer_freq`` is a list of the layers with experts.
        biased: linear layers with a bias, by the names of transformers. Megatron-Core handles those of queries, keys
            and values itself (``add_qkv_bias``), but has only one switch for the others.
        stage: number of the chunk among those of this rank; None if it has only one.
    """
    if HAS_TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm

        norm, specs = TENorm, get_gpt_decoder_layer_specs(transformer, use_transformer_engine=True)
    else:
        norm, activation = _modules()
        dense, sparse = (
            _plain(transformer, num_experts, norm, activation) for num_experts in (None, transformer.num_moe_experts)
        )
        specs = [sparse if has_experts else dense for has_experts in transformer.moe_layer_freq]
    for layer in specs:
        _add_biases(layer, biased)
    first = get_transformer_layer_offset(transformer, vp_stage=stage)
    count = get_num_layers_to_build(transformer, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=specs[first : first + count], layer_norm=norm)


def _modules() -> tuple[type[AttentionNorm], type | None]:
    """Return the norm of plain layers, and their activation if it is a module of its own."""
    if not has_kernels():
        return AttentionNorm, None
    from tandem.trainer.backends.megatron.on_cpu import kernels, norm

    return norm.CpuNorm, kernels.SwiGlu


def _plain(
    transformer: TransformerConfig, num_experts: int | None, norm: type[AttentionNorm], activation: type | None
) -> ModuleSpec:
    """Return a layer of Megatron-Core's own modules, with this project's norm and attention."""
    is_latent = transformer.multi_latent_attention
    has_norms = is_latent or transformer.qk_layernorm
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=has_norms,
        multi_latent_attention=is_latent,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if activation is not None:
        for feed_forward in _feed_forwards(layer.submodules.mlp.submodules):
            feed_forward.activation_func = activation
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if is_latent:
        # Megatron-Core's own cut along their rows, and then the part of the keys that carries positions gets only what
        # the heads of one rank add to its gradient.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        attention.q_layernorm = attention.kv_layernorm = norm
    elif has_norms:
        attention.q_layernorm = attention.k_layernorm = norm
    return layer


def _add_biases(layer: ModuleSpec, biased: Set[str]) -> None:
    if "o_proj" in biased:
        attention = layer.submodules.self_attention.submodules
        attention.linear_proj = _add_bias(attention.linear_proj)
    if "down_proj" in biased:
        mlp = layer.submodules.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = _add_bias(mlp.linear_fc1), _add_bias(mlp.linear_fc2)


@functools.cache
def _add_bias(linear: type) -> type:
    """Return a linear layer of Megatron-Core with a bias, whatever the configuration says of all layers."""
    if hasattr(linear, "always_has_bias"):  # a specification may stand for several layers
        return linear

    class Biased(linear):  # type: ignore[misc]
        always_has_bias = True

        def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
            super().__init__(*args, bias=True, **kwargs)

    return Biased


def _feed_forwards(submodules: MLPSubmodules | MoESubmodules) -> list[MLPSubmodules]:
    """Return the parts of a layer that have an activation function: itself, or its experts."""
    if isinstance(submodules, MLPSubmodules):
        return [submodules]
    return [submodules.experts.submodules, submodules.shared_experts.submodules]
