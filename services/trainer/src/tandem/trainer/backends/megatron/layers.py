"""What the layers of a chunk are made of: Transformer Engine's modules where it is installed, otherwise torch's own.

A model may have dense layers and layers with experts; each chunk gets the specifications of just its layers.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tandem.trainer.backends.megatron.attention import CoreAttention, Norm
from tandem.trainer.backends.megatron.cpu import HAS_TRANSFORMER_ENGINE


def layers_of(transformer: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this rank's chunk.

    Args:
        transformer: of the whole model; its ``moe_layer_freq`` is a list that says which layers have experts.
        stage: number of the chunk among those of this rank; None if it has but one.
    """
    if HAS_TRANSFORMER_ENGINE:
        from megatron.core.extensions.transformer_engine import TENorm

        norm, specs = TENorm, get_gpt_decoder_layer_specs(transformer, use_transformer_engine=True)
    else:
        norm = Norm
        dense, sparse = (_plain(transformer, num_experts) for num_experts in (None, transformer.num_moe_experts))
        specs = [sparse if has_experts else dense for has_experts in transformer.moe_layer_freq]
    first = get_transformer_layer_offset(transformer, vp_stage=stage)
    count = get_num_layers_to_build(transformer, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=specs[first : first + count], layer_norm=norm)


def _plain(transformer: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    """Return a layer of Megatron-Core's own modules, with this project's norm and attention in it."""
    is_latent = transformer.multi_latent_attention
    has_norms = is_latent or transformer.qk_layernorm
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=has_norms,
        multi_latent_attention=is_latent,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if is_latent:
        # Megatron-Core's own cut along their rows, and then the part of the keys that carries positions gets only what
        # the heads of one rank add to its gradient.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        attention.q_layernorm = attention.kv_layernorm = Norm
    elif has_norms:
        attention.q_layernorm = attention.k_layernorm = Norm
    return layer
