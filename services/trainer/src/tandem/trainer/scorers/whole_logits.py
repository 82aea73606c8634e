"""Scores of tokens from whole logits, for models that change what their output layer says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.trainer.batching.masks import NEVER, TokenMasks
from tandem.trainer.scores import StudentScores, TokenScores

_ENTROPY_ROWS = 1024
"""Positions for which entropy is computed at once, so that a large vocabulary needs little extra memory."""


def exclude_tokens(logits_KV: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """Return whole logits by which these tokens have probability zero."""
    if not token_ids:
        return logits_KV
    return logits_KV.index_fill(1, torch.tensor(token_ids, device=logits_KV.device), NEVER)


def scores_of_logits(
    logits_KV: torch.Tensor,
    target_K: torch.Tensor,
    others_KN: torch.Tensor | None,
    *,
    learns_entropy: bool,
    masks: TokenMasks | None = None,
) -> TokenScores | StudentScores:
    """Return the scores of the targets, as `tandem.trainer.scoring.score_tokens` does from hidden states."""
    if masks is not None:
        logits_KV = logits_KV.masked_fill(masks.is_outside(logits_KV.shape[1], 0), NEVER)
    logprobs_KV = logits_KV.log_softmax(dim=-1)
    logprobs_K = logprobs_KV.gather(1, target_K[:, None])[:, 0]
    detached_KV = logprobs_KV.detach()
    is_likeliest_K = (logprobs_K.detach() == detached_KV.amax(dim=-1)).float()
    scores = logprobs_K, _entropy(logprobs_KV if learns_entropy else detached_KV), is_likeliest_K
    if others_KN is None:
        return TokenScores(*scores)
    return StudentScores(*scores, logprobs_KV.gather(1, others_KN))


def _entropy(logprobs_KV: torch.Tensor) -> torch.Tensor:
    parts = []
    for logprobs_RV in torch.split(logprobs_KV, _ENTROPY_ROWS):
        # A token that is ruled out has logit -inf and adds nothing, nor does its gradient.
        finite_RV = logprobs_RV.masked_fill(logprobs_RV.isinf(), 0.0)
        parts.append(-(logprobs_RV.exp() * finite_RV).sum(dim=-1))
    return torch.cat(parts) if parts else logprobs_KV.new_zeros(0)
