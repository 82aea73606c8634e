"""Model families supported by each part of the system, by their ``model_type`` in Transformers."""

from __future__ import annotations

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

VLLM = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "phi3", "glm4_moe")
"""Families with tables of their parameters in vLLM; of others its loader says where everything lies."""

VLLM_PLANNED = (*VLLM, "deepseek_v3")
"""Families with descriptions of their shards in vLLM: those that engines run, and those that can only be planned."""

VLLM_SEEING = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
"""Families that see, of which the same holds in vLLM, tower included."""

VLLM_READS = {
    "deepseek_v3": ("topk_method", "scoring_func"),
    "glm4_moe": ("head_dim",),
    "glm4_moe_lite": ("first_k_dense_replace",),
    "lfm2": ("block_dim", "conv_dim"),
    "minimax_m2": ("rotary_dim", "scoring_func"),
}
"""Fields that vLLM reads of a family's ``config.json``, and that Transformers does not write of its own accord."""
