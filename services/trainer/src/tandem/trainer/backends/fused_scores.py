"""Scores of tokens as of `tandem.trainer.scoring`, with each pass over the logits in one kernel.

There, each operation on the logits goes through memory. Here a chunk of logits stays in the type of the matrix product,
is read twice for the sums, and in the backward pass is read once and its gradient written once. One token is scored at
each position, by a rank that holds the whole output layer.

Shapes: as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem.trainer import scoring
from tandem.trainer.backends.compiling import compiled
from tandem.trainer.batching.masks import TokenMasks
from tandem.trainer.scores import StudentScores, TokenScores
from tandem.trainer.scoring import VocabularyShard, columns_at_once

_LOGITS = 2**27
"""Logits that may exist at once: 256 MiB of bfloat16."""


def score_tokens(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_K: torch.Tensor,
    *,
    temperature: float,
    vocabulary: VocabularyShard | None = None,
    others_KN: torch.Tensor | None = None,
    learns_entropy: bool = False,
    undrawable: Sequence[int] = (),
    masks: TokenMasks | None = None,
) -> TokenScores | StudentScores:
    """Return what `tandem.trainer.scoring.score_tokens` does, by fused kernels where these can.

    If not all logits fit into a chunk, the backward pass computes them again.
    """
    if vocabulary is not None or others_KN is not None or learns_entropy or undrawable or masks is not None:
        return scoring.score_tokens(
            hidden_KH,
            weight_VH,
            target_K,
            temperature=temperature,
            vocabulary=vocabulary,
            others_KN=others_KN,
            learns_entropy=learns_entropy,
            undrawable=undrawable,
            masks=masks,
        )
    chunk = max(1, _LOGITS // weight_VH.shape[0])
    keeps = torch.is_grad_enabled() and len(hidden_KH) <= chunk
    scores: tuple[torch.Tensor, ...] = _FusedScores.apply(  # type: ignore[no-untyped-call]
        hidden_KH, weight_VH, target_K, temperature, chunk, keeps
    )
    return TokenScores(*scores)


class _FusedScores(torch.autograd.Function):
    """The scoring function. Forward goes over the tokens in chunks, and backward over the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_K: torch.Tensor,
        temperature: float,
        chunk: int,
        keeps: bool,
    ) -> tuple[torch.Tensor, ...]:
        logits_RV = None
        parts = []
        for hidden_RH, target_R in zip(torch.split(hidden_KH, chunk), torch.split(target_K, chunk), strict=True):
            logits_RV = None  # before the next are made
            logits_RV = hidden_RH @ weight_VH.T
            parts.append(compiled(_sums)(logits_RV, target_R, temperature))
        max_K, sum_K, weighted_K, logit_K = torch.cat(parts, dim=1)
        ctx.save_for_backward(hidden_KH, weight_VH, target_K, max_K, sum_K, logits_RV if keeps else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        log_sum_K = sum_K.log()
        entropy_K = log_sum_K - weighted_K / sum_K
        is_likeliest_K = (logit_K == 0.0).float()  # relative to the largest, so zero for that one
        ctx.mark_non_differentiable(is_likeliest_K, entropy_K)
        return logit_K - log_sum_K, entropy_K, is_likeliest_K

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_KH, weight_VH, target_K, max_K, sum_K, logits_KV = ctx.saved_tensors
        grad_K = grads[0] / ctx.temperature
        grad_hidden_KH = torch.zeros(hidden_KH.shape, dtype=torch.float32, device=hidden_KH.device)
        grad_weight_VH = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
        num_columns = columns_at_once(ctx.chunk * len(weight_VH), len(hidden_KH))
        for first in range(0, len(weight_VH), num_columns):
            columns = slice(first, min(first + num_columns, len(weight_VH)))
            weight_CH = weight_VH[columns]
            logits_KC = hidden_KH @ weight_CH.T if logits_KV is None else logits_KV[:, columns]
            grad_KC = compiled(_gradient)(logits_KC, max_K, sum_K, target_K - first, grad_K, ctx.temperature)
            grad_hidden_KH += grad_KC @ weight_CH
            if grad_weight_VH is not None:
                torch.mm(grad_KC.T, hidden_KH, out=grad_weight_VH[columns])
            del logits_KC, grad_KC  # before the next are made
        return grad_hidden_KH.to(hidden_KH.dtype), grad_weight_VH, None, None, None, None


def _sums(logits_RV: torch.Tensor, target_R: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return, ``[4, R]``, the largest logit ``m``, the sums of ``exp(x)`` and ``x exp(x)``, and ``x`` of the target.

    ``x`` are the logits minus ``m``.
    """
    scaled_RV = logits_RV.float() / temperature
    max_R = scaled_RV.amax(dim=1)
    below_RV = scaled_RV - max_R[:, None]
    exp_RV = below_RV.exp()
    of_target_R = below_RV.gather(1, target_R[:, None])[:, 0]
    return torch.stack([max_R, exp_RV.sum(dim=1), (below_RV * exp_RV).sum(dim=1), of_target_R])


def _gradient(
    logits_KC: torch.Tensor,
    max_K: torch.Tensor,
    sum_K: torch.Tensor,
    column_K: torch.Tensor,
    grad_K: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient by logits, in their type: that of log p[token] is one-hot(token) - p.

    `column_K` is outside of the columns where the token is not among them.
    """
    p_KC = (logits_KC.float() / temperature - max_K[:, None]).exp() / sum_K[:, None]
    is_token_KC = torch.arange(logits_KC.shape[1], device=logits_KC.device) == column_K[:, None]
    return ((is_token_KC.float() - p_KC) * grad_K[:, None]).to(logits_KC.dtype)
