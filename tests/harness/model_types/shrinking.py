"""Tiny configurations of every type of causal language model in Transformers, with all of its kinds of layers."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
import transformers
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.harness.trainers.trainer_harness import VOCABULARY

_LEFT_OUT = {
    "decoders of encoder-decoder models": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart
        prophetnet trocr whisper
    """,
    "encoders, which attend in both directions unless a field says otherwise": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta
        roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod
    """,
    "models with a tower for images or sound, whose language model has a type of its own or none": """
        dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama moshi
        moss_transcribe_diarize phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp
    """,
    "drafts for another model's speculation": "gemma4_assistant gemma4_unified_assistant",
}
LEFT_OUT = {reason: tuple(types.split()) for reason, types in _LEFT_OUT.items()}
"""Types that Transformers lists with causal language models, and what they are."""
MODEL_TYPES = tuple(
    sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {each for types in LEFT_OUT.values() for each in types})
)

KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Fields that list the kind of each layer."""
_NUMBERS_OF_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks")
_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "lru_width", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "swa_head_dim"), 8),
    # Experts.
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "zero_expert_num"), 1),
    "router_hidden_size": 8,
    # Latent attention, and attention to indexed tokens.
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "index_n_heads": 8,  # of fewer, rectified scores tie, and any of the tied tokens may be the ones attended to
    "index_head_dim": 8,
    "index_topk": 8,
    "rotary_dim": 4,
    # Attention over less than the longest row.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 6),
    "attention_chunk_size": 6,
    "d_rel": 4,
    "rel_extent": 16,
    # Gated delta nets and state-space layers.
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "linear_num_key_heads": 2,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "n_mamba_heads": 2,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    # Everything else.
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    "num_nextn_predict_layers": 0,
    "laurel_rank": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
"""Sizes by the names that configurations have for them; those that a type lacks are left out."""

_TWO_ATTENTIONS = ["full_attention", "sliding_attention"]
_BOTH_FEED_FORWARDS = ["dense", "sparse"]
_SHARED_KEYS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
"""Four layers, the last two of which have the keys and values of those before."""
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 32,
        "encoder_hash_byte_group_size": [3],
        "patch_in_forward": False,
        **{
            f"{part}_config": {
                "hidden_size": 64 if part == "global" else 32,
                "hidden_size_global": 64,
                "intermediate_size": 48,
                "num_attention_heads": 4,
                "num_hidden_layers": 1,
                "vocab_size": VOCABULARY,
            }
            for part in ("patcher", "encoder", "decoder", "global")
        },
    },
    "cohere2_moe": {
        "layer_types": _TWO_ATTENTIONS,
        "mlp_layer_types": _BOTH_FEED_FORWARDS,
        "prefix_dense_intermediate_size": 48,
    },
    "cohere_compass_text": {
        "layer_types": _TWO_ATTENTIONS,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
    },
    "dots1": {
        "layer_types": _TWO_ATTENTIONS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "falcon_h1": {"mamba_rms_norm": True},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        **_SHARED_KEYS,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        **_SHARED_KEYS,
        "head_dim": 8,
        "global_head_dim": 16,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gemma4_unified_text": {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "hrm_text": {"L_cycles": 2, "prefix_lm": False},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_loop_text": {
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
        "unpadded_vocab_size": VOCABULARY,
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 1, "unpadded_vocab_size": VOCABULARY},
    "inkling_text": {"mlp_layer_types": _BOTH_FEED_FORWARDS, "unpadded_vocab_size": VOCABULARY},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "laguna": {"layer_types": _TWO_ATTENTIONS, "mlp_layer_types": _BOTH_FEED_FORWARDS},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"head_dim": 16},
    "mellum": {"layer_types": _TWO_ATTENTIONS, "mlp_layer_types": _BOTH_FEED_FORWARDS},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": _BOTH_FEED_FORWARDS,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 16,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "output_gate_type": "sigmoid",
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "stablelm": {"qk_layernorm": True},
    "youtu": {"pad_token_id": None},  # loading it sets the row of that token to zero
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mem_rope": True},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 6},
}
"""Fields of one type: those that it has under no other's name, and those whose defaults lack a kind of layer."""

_NEVER_BUILT = re.compile("Vision|Audio|Multi[Mm]odal|SequenceSummary|FlashAttention2")
UNUSED: dict[str, tuple[str, ...]] = {
    "aria_text": ("AriaCrossAttention", "AriaProjector", "AriaProjectorMLP"),  # of its tower
    "cohere2_moe": ("Cohere2MoeRMSNorm",),  # in place of its LayerNorm where `rms_norm_eps` is set
    "cpmant": ("CpmAntIntermediate", "CpmAntOutput"),  # which nothing builds
    "doge": ("DogeCDMoE",),  # in place of DogeMLP with `is_moe`: see findings/doge_experts_of_other_tokens.sh
    "flex_olmo": ("FlexOlmoMLP",),  # which nothing builds
    "gemma4_text": ("Gemma4ClippableLinear",),  # of its tower
    "llama4_text": ("Llama4UnfoldConvolution",),  # of its tower
    "olmoe": ("OlmoeMLP",),  # which nothing builds
}
"""Modules of a type's file that no configuration of its language model has together with the others."""


def shrink(model_type: str) -> Any:
    """Return a tiny configuration."""
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    own = _OWN.get(model_type, {})
    if model_type == "blt":  # its default configuration alone takes minutes to make
        return kind(**own, **_tokens())
    plain = kind()
    fields: dict[str, Any] = {
        name: size
        for name, size in _SIZES.items()
        if isinstance(read_field(plain, name), int) and not isinstance(getattr(kind, name, None), property)
    }
    if "qk_rope_head_dim" in fields:  # latent attention has as many keys as queries, and a head that follows
        fields["num_key_value_heads"] = 4
        fields.pop("head_dim", None)
    listed = {name: list(dict.fromkeys(kinds)) for name, kinds in list_kinds(plain).items()}
    listed = {name: kinds for name, kinds in listed.items() if not _is_derived(kind, name)} | {
        name: kinds for name, kinds in own.items() if name in KINDS
    }
    num_layers = max([2, *map(len, listed.values())])
    fields |= {name: (kinds * num_layers)[:num_layers] for name, kinds in listed.items()}
    fields |= {name: num_layers for name in _NUMBERS_OF_LAYERS if isinstance(read_field(plain, name), int)}
    return kind(**fields | _tokens() | own)


def _tokens() -> dict[str, int]:
    return {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _is_derived(kind: Any, name: str) -> bool:
    """Tell whether a configuration computes a field, or has it under another name."""
    return name in kind.attribute_map or isinstance(getattr(kind, name, None), property)


def read_field(config: Any, name: str) -> Any:
    """Return a field; None where there is none, or where it differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return None


def list_kinds(config: Any) -> dict[str, list[str]]:
    """Return the kinds of all layers, by the field that lists them."""
    lists = {name: read_field(config, name) for name in KINDS}
    return {name: kinds for name, kinds in lists.items() if isinstance(kinds, list) and kinds}


def list_lost_kinds(model_type: str) -> list[str]:
    """Return the kinds of layers that a type's default configuration has and its tiny one lacks."""
    if model_type == "blt":
        return []
    plain, tiny = list_kinds(transformers.CONFIG_MAPPING[model_type]()), list_kinds(shrink(model_type))
    return sorted({kind for name, kinds in plain.items() for kind in {*kinds} - {*tiny.get(name, ())}})


def list_lost_modules(model_type: str) -> list[str]:
    """Return the modules in the file of a type's model that its tiny model does not consist of.

    A kind of layer that the default configuration lacks as well, as LFM2's lacks convolutions, shows here.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shrink(model_type))
    file = sys.modules[type(model).__module__]
    kinds = [kind for kind in vars(file).values() if inspect.isclass(kind) and kind.__module__ == file.__name__]
    modules = {
        kind.__name__
        for kind in kinds
        if issubclass(kind, torch.nn.Module) and not issubclass(kind, transformers.PreTrainedModel)
    }
    built = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return sorted(name for name in modules - built - {*UNUSED.get(model_type, ())} if not _NEVER_BUILT.search(name))
