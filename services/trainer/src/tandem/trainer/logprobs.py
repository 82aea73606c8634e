"""Log-probabilities of the tokens of a micro-batch under a Hugging Face causal language model."""

from __future__ import annotations

from typing import Any

import torch

from tandem.trainer.packing import MicroBatch


def token_logprobs(model: torch.nn.Module, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``logprobs_BT`` (with gradient, if gradients are on) and ``entropy_BT`` (never).

    Position ``t`` holds the log-probability of token ``t`` given the tokens before it, at the sampling temperature, and
    the entropy of the distribution it was drawn from; positions before the first counted token hold zero. Only the
    positions from there on go through the output layer. Right padding needs no attention mask: a causal model never
    looks at it from a valid position.
    """
    tokens_BT = batch.token_ids_BT
    columns = batch.loss_mask_BT.any(dim=0).nonzero()
    first = int(columns[0]) if len(columns) else 1
    last = int(columns[-1]) if len(columns) else 0
    keep_K = torch.arange(first - 1, max(last, first), device=tokens_BT.device)  # position t predicts token t + 1
    called: Any = model
    logits_BKV = called(input_ids=tokens_BT, logits_to_keep=keep_K, use_cache=False).logits
    scores_BKV = logits_BKV.float() / temperature
    logprobs_BKV = torch.log_softmax(scores_BKV, dim=-1)
    targets_BK = tokens_BT[:, (keep_K + 1).clamp(max=tokens_BT.shape[1] - 1)]
    logprobs_BK = logprobs_BKV.gather(-1, targets_BK[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy_BK = -(logprobs_BKV.exp() * logprobs_BKV).sum(dim=-1)
    padding = (first, tokens_BT.shape[1] - first - len(keep_K))
    if padding[1] < 0:  # a row of one token: nothing is predicted
        logprobs_BK, entropy_BK, padding = logprobs_BK[:, :0], entropy_BK[:, :0], (tokens_BT.shape[1], 0)
    return (
        torch.nn.functional.pad(logprobs_BK, padding),
        torch.nn.functional.pad(entropy_BK, padding),
    )
