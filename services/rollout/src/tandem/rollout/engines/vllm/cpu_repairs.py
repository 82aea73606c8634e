"""Repairs of vLLM on a CPU: experts of other workers, biases of routers, rotations of heads.

Each replaces a function of vLLM's by one that differs only where that one is wrong.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def repair_models() -> None:
    """Have routers and rotary embeddings compute what they compute on a GPU."""
    _add_router_bias()
    _rotate_heads()


def _add_router_bias() -> None:
    """Have routers with a softmax choose by the scores and the bias that the model adds to them (ERNIE 4.5).

    vLLM's router for CPUs drops the bias where experts are in no groups.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    compute = CPURouter._compute_routing

    def compute_with_bias(router: Any, hidden: torch.Tensor, logits_TE: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        bias_E = router.e_score_correction_bias
        is_dropped = router.scoring_func == "softmax" and not router.use_grouped_topk
        if bias_E is None or not is_dropped or router.custom_routing_function is not None:
            return compute(router, hidden, logits_TE, *args, **kwargs)
        scores_TE = logits_TE.float().softmax(dim=-1)
        ids_TK = (scores_TE + bias_E).topk(router.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if router.renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK * router.routed_scaling_factor, ids_TK.to(torch.int32)

    CPURouter._compute_routing = compute_with_bias


def _rotate_heads() -> None:
    """Have rotary embeddings rotate queries of shape [tokens, heads, elements] (latent attention of DeepSeek).

    vLLM's kernel for CPUs takes the distance between heads for that between tokens.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    forward = RotaryEmbedding.forward_cpu

    def forward_heads(
        layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rotate = forward if query.dim() == 2 else type(layer).forward_native
        rotated: tuple[torch.Tensor, torch.Tensor | None] = rotate(layer, positions, query, key)
        return rotated

    RotaryEmbedding.forward_cpu = forward_heads


@functools.cache
def map_experts() -> None:
    """Have a worker's experts skip tokens of other workers' experts.

    vLLM's kernel for CPUs takes a token's global expert numbers for its own, and reads beyond its weights.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def apply_own(
        experts: Any,
        *,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        **kwargs: Any,
    ) -> None:
        if expert_map is not None:
            local_ids = expert_map[topk_ids.long()]  # -1: an expert of another worker
            topk_weights = topk_weights.masked_fill(local_ids < 0, 0.0)
            topk_ids = local_ids.clamp(min=0).to(topk_ids.dtype)
        apply(experts, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **kwargs)

    CPUUnquantizedExperts.apply = apply_own
