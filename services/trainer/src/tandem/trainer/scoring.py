"""Log-probabilities of tokens straight from hidden states, without all logits at once.

With a large vocabulary the logits of a long row are the largest tensor of a training step. Here they are computed some
at a time, forward and, again, backward. Where the output layer is spread over tensor-parallel ranks, each works on its
own rows of it, and only numbers of one a token travel (Megatron-LM's cross entropy; Shoeybi et al. 2019,
arXiv:1909.08053, section 3).

Shapes: ``K`` scored tokens, ``R`` of them at a time; ``H`` hidden dimensions; ``V`` rows of the output layer that this
rank holds, ``C`` of them at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

_LOGITS = 2**26
"""Logits that may exist at once unless the caller says otherwise: 256 MiB of float32."""

_CACHED = 2**17
"""Logits that stay in the cache of a core of a CPU from one operation on them to the next: 512 KiB of float32."""

_NEVER = -1e30
"""The logit of what is no token: its probability is zero, and zero times this is not NaN, as with infinity."""


class TokenScores(NamedTuple):
    """What a policy says of tokens: of each a number, float32."""

    logprobs: torch.Tensor
    """Of the token, with gradient."""
    entropy: torch.Tensor
    """Of the distribution it was drawn from, without."""
    is_likeliest: torch.Tensor
    """One where no token had a larger logit, else zero."""


class TokenValues(NamedTuple):
    """What a value model says of tokens: of each a number, float32."""

    values: torch.Tensor
    """What is expected, before the token is made, of the rest of its response; with gradient."""


Scores = TokenScores | TokenValues
"""What any model says of tokens; the first number is what a column of its scores has."""


class VocabularyShard(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of an output layer this rank holds; the others of the group hold the rest."""

    group: dist.ProcessGroup
    first_row: int
    """The token of this rank's first row."""
    num_rows: int
    """Tokens of the whole vocabulary: rows from this one on are padding."""


def score_tokens(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_K: torch.Tensor,
    *,
    temperature: float,
    vocabulary: VocabularyShard | None = None,
    chunk: int | None = None,
) -> TokenScores:
    """Return the scores of the targets.

    The distributions are ``softmax(hidden_KH @ weight_VH.T / temperature)``, computed in float32 from logits of the
    inputs' type. At most `chunk` times ``V`` logits exist at once; where that is fewer than all, backward computes them
    again, and where it is not, it uses up what forward kept, so that a second backward is an error. With `vocabulary`,
    every rank of its group passes the same ``hidden_KH`` and ``target_K`` and gets the same scores; the gradient of
    ``hidden_KH`` is already summed over the group.
    """
    if chunk is None:
        chunk = max(1, _LOGITS // weight_VH.shape[0])
    keeps = torch.is_grad_enabled() and len(hidden_KH) <= chunk
    scores_K: tuple[torch.Tensor, ...] = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden_KH, weight_VH, target_K, temperature, vocabulary, chunk, keeps
    )
    return TokenScores(*scores_K)


class _Scores(torch.autograd.Function):
    """Forward goes over the tokens, a chunk at a time; backward over the vocabulary.

    So each row of the weight's gradient is the result of one matrix product, not a sum of rounded ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_K: torch.Tensor,
        temperature: float,
        vocabulary: VocabularyShard | None,
        chunk: int,
        keeps: bool,
    ) -> tuple[torch.Tensor, ...]:
        num_rows = weight_VH.shape[0]
        first, size = (0, num_rows) if vocabulary is None else (vocabulary.first_row, vocabulary.num_rows)
        num_tokens = max(0, min(num_rows, size - first))  # none where all rows are padding
        row_K = target_K - first
        is_here_K = (row_K >= 0) & (row_K < num_tokens)
        row_K = row_K.clamp(0, num_rows - 1)

        logits_RV = None
        parts = []
        for hidden_RH, row_R in zip(torch.split(hidden_KH, chunk), torch.split(row_K, chunk), strict=True):
            logits_RV = None  # before the next are made
            logits_RV = _logits(hidden_RH, weight_VH, temperature)
            parts.append(_sums(logits_RV, row_R, num_tokens))
        max_K, sum_K, weighted_K, target_logit_K = torch.cat(parts, dim=1)
        target_logit_K = target_logit_K.where(is_here_K, 0.0)

        scale_K = torch.ones_like(max_K)  # from this rank's largest logit to that of all ranks
        if vocabulary is not None:
            whole_max_K = max_K.clone()
            dist.all_reduce(whole_max_K, dist.ReduceOp.MAX, vocabulary.group)
            lower_K = max_K - whole_max_K
            scale_K = lower_K.exp()
            sums_3K = torch.stack(
                [sum_K * scale_K, (weighted_K + lower_K * sum_K) * scale_K, target_logit_K + lower_K * is_here_K]
            )
            dist.all_reduce(sums_3K, group=vocabulary.group)
            sum_K, weighted_K, target_logit_K = sums_3K
        log_sum_K = sum_K.log()

        exp_KV = logits_RV if keeps else None
        ctx.save_for_backward(hidden_KH, weight_VH, row_K, is_here_K, max_K, scale_K / sum_K, exp_KV)
        ctx.temperature, ctx.vocabulary = temperature, vocabulary
        ctx.num_tokens, ctx.chunk = num_tokens, chunk
        entropy_K = log_sum_K - weighted_K / sum_K
        is_likeliest_K = (target_logit_K == 0.0).float()  # relative to the largest, which it is then
        ctx.mark_non_differentiable(entropy_K, is_likeliest_K)
        return target_logit_K - log_sum_K, entropy_K, is_likeliest_K

    @staticmethod
    def backward(ctx: Any, *grads_K: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_KH, weight_VH, row_K, is_here_K, max_K, scale_K, exp_KV = ctx.saved_tensors
        grad_K = grads_K[0] / ctx.temperature
        spread_K1 = (-grad_K * scale_K)[:, None]
        grad_K1 = (grad_K * is_here_K)[:, None]
        grad_hidden_KH = torch.zeros(hidden_KH.shape, dtype=torch.float32, device=hidden_KH.device)
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = torch.empty_like(weight_VH)
            grad_weight_VH[ctx.num_tokens :] = 0.0
        # As many logits at once as in forward. Padding has no gradient.
        num_columns = max(1, ctx.chunk * len(weight_VH) // max(1, len(hidden_KH)))
        for first in range(0, ctx.num_tokens, num_columns):
            columns = slice(first, min(first + num_columns, ctx.num_tokens))
            weight_CH = weight_VH[columns]
            # The gradient of log p[target] by the logits: one-hot(target) - p.
            if exp_KV is None:
                logits_KC = _logits(hidden_KH, weight_CH, ctx.temperature)
                grad_KC = logits_KC.sub_(max_K[:, None]).exp_().mul_(spread_K1)
            else:
                grad_KC = exp_KV[:, columns].mul_(spread_K1)  # in place: the largest tensor of a step exists once
            column_K1 = row_K[:, None] - first
            is_inside_K1 = (column_K1 >= 0) & (column_K1 < len(weight_CH))
            grad_KC.scatter_add_(1, column_K1.clamp(0, len(weight_CH) - 1), grad_K1 * is_inside_K1)
            rounded_KC = grad_KC.to(weight_VH.dtype)
            grad_hidden_KH += rounded_KC @ weight_CH
            if grad_weight_VH is not None:
                torch.mm(rounded_KC.T, hidden_KH, out=grad_weight_VH[columns])
        grad_hidden_KH = grad_hidden_KH.to(hidden_KH.dtype)
        if ctx.vocabulary is not None:
            dist.all_reduce(grad_hidden_KH, group=ctx.vocabulary.group)
        return grad_hidden_KH, grad_weight_VH, None, None, None, None, None


def _sums(logits_RV: torch.Tensor, row_R: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return, by token, the largest logit and, relative to it, what the scores are made of.

    With ``x`` the logits less their largest, ``[4, R]`` holds that largest, the sums of ``exp(x)`` and ``x exp(x)``,
    and ``x`` of row ``row_R``. In the place of the logits are the exponentials then.
    """
    logits_RV[:, num_tokens:] = _NEVER
    size = len(logits_RV) if logits_RV.is_cuda else _CACHED // logits_RV.shape[1]
    parts = []
    for logits_BV, row_B in zip(*(torch.split(tensor, max(1, size)) for tensor in (logits_RV, row_R)), strict=True):
        max_B = logits_BV.amax(dim=1)
        below_BV = logits_BV - max_B[:, None]
        target_B = below_BV.gather(1, row_B[:, None])[:, 0]
        exp_BV = torch.exp(below_BV, out=logits_BV)
        parts.append(torch.stack([max_B, exp_BV.sum(dim=1), below_BV.mul_(exp_BV).sum(dim=1), target_B]))
    return torch.cat(parts, dim=1)


def _logits(hidden_RH: torch.Tensor, weight_CH: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits in float32, in memory of their own."""
    logits_RC = (hidden_RH @ weight_CH.T).float()
    return logits_RC if temperature == 1.0 else logits_RC.div_(temperature)
