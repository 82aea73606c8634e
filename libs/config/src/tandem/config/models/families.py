"""Which model families each part of the system knows, by their ``model_type`` of transformers."""

from __future__ import annotations

TENSOR_PLANS = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "phi3", "gpt_oss", "glm4_moe")
"""Those that the DTensor backend has a tensor-parallel plan for; it trains any whose attention it can replace."""

FUSED_HEADS = ("phi3",)
"""Those where one layer makes queries, keys and values: ranks share its rows, whichever those are, and no heads."""

MEGATRON = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "mistral", "phi3", "glm4_moe")
"""Those that Megatron-Core's GPTModel computes as transformers does, and whose shards are described."""

MEGATRON_ADAPTERS = tuple(family for family in MEGATRON if family != "deepseek_v3")
"""Those of them whose linear layers can have low-rank adapters there: latent attention has others."""

VLLM = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "phi3", "glm4_moe")
"""Those of vLLM whose every weight is computed with from the parameter that a refit writes."""

VLLM_PLANNED = (*VLLM, "deepseek_v3")
"""Those whose shards in vLLM are described: what engines run, and what can only be planned yet."""
