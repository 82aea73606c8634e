"""The translation of a Hugging Face configuration into the arguments of Megatron-Core's.

Models that Megatron-Core computes differently from transformers are refused by name, because the trained model must be
the model that engines run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from tandem.common.errors import ModelError
from tandem.config.models.families import MEGATRON
from tandem.refit.adapters.geometry import (
    AttentionGeometry,
    DecoderGeometry,
    ExpertGeometry,
    LatentAttention,
    find_biased_projections,
    geometry_of,
    has_head_norms,
)
from tandem.trainer.backends.megatron.preparing import HAS_TRANSFORMER_ENGINE

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants in Megatron-Core's scaling of frequencies for Llama 3."""
_PARTIAL = {"glm4_moe": 0.5}
"""The share of a head that is rotated, for models with files that do not say so, if it is not the whole."""
_WITH_WINDOWS = ("mistral", "phi3")
"""Models in which every layer slides if ``sliding_window`` is set."""


def geometry_in(model: Mapping[str, Any]) -> DecoderGeometry:
    """Return the sizes of a model from its configuration as a mapping. Raises `ModelError` for unsupported models."""
    if model.get("model_type") not in MEGATRON:
        raise ModelError(f"Megatron-Core trains {', '.join(MEGATRON)} here, not {model.get('model_type')}")
    if model.get("hidden_act", "silu") != "silu":
        raise ModelError(f"Megatron-Core's layers have silu here, the model has {model['hidden_act']}")
    if model.get("use_sliding_window"):
        raise ModelError("Megatron-Core's attention slides in all layers or none here: the model's use_sliding_window")
    if model["model_type"] == "deepseek_v3" and model.get("attention_bias"):
        raise ModelError("Megatron-Core's latent attention has no biases here: the model says attention_bias")
    return geometry_of(model)


def transformer_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``TransformerConfig``, or ``MLATransformerConfig``, for a model. Raises `ModelError`."""
    geometry = geometry_in(model)
    arguments: dict[str, Any] = {
        "num_layers": geometry.num_layers,
        "moe_layer_freq": [0] * geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "ffn_hidden_size": geometry.intermediate_size,
        "layernorm_epsilon": model["rms_norm_eps"],
        "init_method_std": model.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,  # for all layers at once: see `_layers_of`
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if isinstance(geometry.attention, LatentAttention):
        arguments |= _latent_attention(geometry.attention, model)
    else:
        arguments |= _attention(geometry.attention, model)
        if sections := rope_of(model).get("mrope_section"):
            arguments["mrope_section"] = sections
    return arguments | (_experts(geometry.experts, geometry, model) if geometry.experts is not None else {})


def embedding_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``GPTModel`` for a model's embeddings and positions. Raises `ModelError`."""
    rope = rope_of(model)
    arguments = {
        "max_sequence_length": model["max_position_embeddings"],
        "share_embeddings_and_output_weights": geometry_in(model).is_tied,
        "position_embedding_type": "mrope" if "mrope_section" in rope else "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope["partial_rotary_factor"],
    }
    if rope["rope_type"] == "llama3":
        differing = {key: rope[key] for key, value in _LLAMA3.items() if rope[key] != value}
        if differing:
            raise ModelError(f"Megatron-Core scales Llama 3's rotary embeddings with {_LLAMA3}, not with {differing}")
        return arguments | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if rope["rope_type"] != "default" and model["model_type"] != "deepseek_v3":
        raise ModelError(
            f"Megatron-Core has no rotary embeddings of type {rope['rope_type']} for {model['model_type']}"
        )
    return arguments


def rope_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's parameters, which transformers 4 wrote in two places."""
    rope = dict(model.get("rope_parameters") or model.get("rope_scaling") or {})
    rope.setdefault("rope_theta", model.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("partial_rotary_factor", model.get("partial_rotary_factor", _PARTIAL.get(model["model_type"], 1.0)))
    return rope


def _attention(sizes: AttentionGeometry, model: Mapping[str, Any]) -> dict[str, Any]:
    window = model.get("sliding_window") if model["model_type"] in _WITH_WINDOWS else None
    return {
        "num_attention_heads": sizes.num_heads,
        "num_query_groups": sizes.num_kv_heads,
        "kv_channels": sizes.head_dim,
        "qk_layernorm": has_head_norms(model),
        "add_qkv_bias": "q_proj" in find_biased_projections(model),
        "window_size": None if window is None else (window - 1, 0),  # tokens before a token's own, and behind it
    }


def _latent_attention(sizes: LatentAttention, model: Mapping[str, Any]) -> dict[str, Any]:
    rope = rope_of(model)
    arguments = {
        "multi_latent_attention": True,
        "num_attention_heads": sizes.num_heads,
        "q_lora_rank": sizes.query_rank,
        "kv_lora_rank": sizes.kv_rank,
        "qk_head_dim": sizes.nope_dim,
        "qk_pos_emb_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.value_dim,
        # Without Transformer Engine the norms are there whatever this says, and are whole on every rank. With it set,
        # their gradients would be summed over tensor-parallel ranks once too often.
        "qk_layernorm": HAS_TRANSFORMER_ENGINE,
        "rotary_base": rope["rope_theta"],
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
    if not model.get("rope_interleave", True):
        raise ModelError("Megatron-Core has interleaved rotary embeddings for deepseek_v3: rope_interleave is false")
    if rope["rope_type"] == "yarn":
        return arguments | {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "mscale": rope.get("mscale") or 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }
    if rope["rope_type"] != "default":
        raise ModelError(f"Megatron-Core has no rotary embeddings of type {rope['rope_type']} for deepseek_v3")
    return arguments


def _experts(sizes: ExpertGeometry, geometry: DecoderGeometry, model: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {
        "num_moe_experts": sizes.num_experts,
        "moe_ffn_hidden_size": sizes.intermediate_size,
        "moe_shared_expert_intermediate_size": sizes.shared_size or None,
        "moe_router_topk": model["num_experts_per_tok"],
        "moe_layer_freq": [int(layer in sizes.layers) for layer in range(geometry.num_layers)],
        "moe_aux_loss_coeff": model.get("router_aux_loss_coef") or 0.0,
        "moe_router_pre_softmax": not model.get("norm_topk_prob", False),
    }
    if not sizes.has_bias:
        return arguments
    if not model["norm_topk_prob"]:
        raise ModelError("Megatron-Core normalises the sigmoids of chosen experts: norm_topk_prob is false")
    arguments |= {
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": model["routed_scaling_factor"],
    }
    num_groups, num_chosen = model.get("n_group") or 1, model.get("topk_group") or 1
    if num_groups > 1:
        # transformers ranks groups by their two best experts, Megatron-Core by as many as each chosen group gives.
        if model["num_experts_per_tok"] != 2 * num_chosen:
            raise ModelError(
                f"Megatron-Core chooses {num_chosen} of {num_groups} groups of experts otherwise than transformers "
                f"unless num_experts_per_tok is {2 * num_chosen}"
            )
        arguments |= {"moe_router_num_groups": num_groups, "moe_router_group_topk": num_chosen}
    return arguments
