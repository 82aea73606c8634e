"""Model families supported by each part of the system, by their ``model_type`` in Transformers."""

from __future__ import annotations

from tandem.config.models.vision_families import VISION, family_of
from tandem.config.schema import ModelConfig

TENSOR_PLANS = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "phi3", "gpt_oss", "glm4_moe")
"""Families with a tensor-parallel plan in the DTensor backend, which trains any family with replaceable attention."""

FUSED_HEADS = ("phi3",)
"""Families with fused query, key and value layers: ranks split their rows at any place, regardless of heads."""

MEGATRON = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "mistral", "phi3", "glm4_moe")
"""Families that Megatron-Core's GPTModel computes like Transformers, with descriptions of their shards."""

MEGATRON_VISION = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
"""Families that see with a language model among those, whose tokens attend causally."""

MEGATRON_ADAPTERS = tuple(family for family in MEGATRON if family != "deepseek_v3")
"""Families among them with linear layers for low-rank adapters; latent attention has other layers."""

MTP = ("deepseek_v3", "glm4_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families whose multi-token prediction layers the DTensor backend trains."""

MTP_DRAFTS = MTP
"""Families among them whose layers were run as vLLM's drafts."""

VLLM = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "phi3", "glm4_moe")
"""Families with tables of their parameters in vLLM; of others its loader says where everything lies."""

VLLM_PLANNED = (*VLLM, "deepseek_v3")
"""Families with descriptions of their shards in vLLM: those that engines run, and those that can only be planned."""

VLLM_SEEING = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
"""Families that see, of which the same holds in vLLM, tower included."""

VLLM_TABLES = (*VLLM, *VLLM_SEEING)
"""All families with such tables."""

VLLM_READS = {
    "deepseek_v3": ("topk_method", "scoring_func"),
    "glm4_moe": ("head_dim",),
    "glm4_moe_lite": ("first_k_dense_replace",),
    "lfm2": ("block_dim", "conv_dim"),
    "minimax_m2": ("rotary_dim", "scoring_func"),
}
"""Fields that vLLM reads of a family's ``config.json``, and that Transformers does not write of its own accord."""


def find_language_prefix(model_type: str) -> str:
    """Return the prefix of a language model's parameters in a model of several parts; empty where it is the whole."""
    family = VISION.get(model_type)
    return "" if family is None else family.language_prefix


def find_other_prefixes(model_type: str) -> tuple[str, ...]:
    """Return the prefixes of the parameters beside the language model; empty where it is the whole model."""
    family = VISION.get(model_type)
    return () if family is None else (family.tower_prefix, family.projector_prefix)


def has_blocks(model_type: str) -> bool:
    """Tell whether some tokens of a model attend to each other in both directions, in blocks."""
    family = VISION.get(model_type)
    return family is not None and family.has_image_blocks


def is_text_only(section: ModelConfig) -> bool:
    """Tell whether a section's model takes nothing but text, or is not on this machine."""
    return family_of(section) is None
