"""Log-probabilities of tokens straight from hidden states, without all logits at once.

With a large vocabulary, the logits of a long row are the largest tensor of a training step. Here they are computed in
chunks, in the forward pass and again in the backward pass. If the output layer is spread over tensor-parallel ranks,
each works on its own rows, and only single numbers for each token are exchanged (Megatron-LM's cross entropy; Shoeybi
et al. 2019, arXiv:1909.08053, section 3).

Shapes: ``K`` scored tokens, ``R`` of them at a time; ``N`` tokens scored in the place of each; ``H`` hidden dimensions;
``V`` rows of the output layer that this rank holds, ``C`` of them at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from tandem.trainer.batching.masks import NEVER, TokenMasks, rule_out
from tandem.trainer.scores import StudentScores, TokenScores

_LOGITS = 2**26
"""Most logits that may exist at once unless the caller sets a number: 256 MiB of float32."""

_FEWEST = 2**23
"""Logits that may always exist at once on a CPU: 32 MiB of float32. Fewer make its matrix products slower."""

_STATES = 4
"""On a CPU, logits at once for each number of the hidden states that they are made of. A layer's backward pass has more
than that beside it.
"""

_CACHED = 2**17
"""Logits that stay in the cache of a CPU core between operations: 512 KiB of float32."""

_ALIGNED = 64
"""Columns of logits at once, or a multiple of them."""


class VocabularyShard(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an output layer that this rank holds. The others of the group hold the rest."""

    group: dist.ProcessGroup
    first_row: int
    """The token of this rank's first row."""
    num_rows: int
    """Tokens of the whole vocabulary. Rows from this one on are padding."""


def score_tokens(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_K: torch.Tensor,
    *,
    temperature: float,
    vocabulary: VocabularyShard | None = None,
    chunk: int | None = None,
    others_KN: torch.Tensor | None = None,
    learns_entropy: bool = False,
    undrawable: Sequence[int] = (),
    masks: TokenMasks | None = None,
) -> TokenScores | StudentScores:
    """Return the scores of the targets: `StudentScores` if others are scored in their places, too.

    The distributions are ``softmax(hidden_KH @ weight_VH.T / temperature)``, computed in float32 from logits of the
    inputs' type. At most `chunk` times ``V`` logits exist at once. If these are not all, the backward pass computes
    them again. If they are, it uses up those of the forward pass, so that a second backward pass is an error. With
    `vocabulary`, every rank of its group passes the same ``hidden_KH`` and tokens and gets the same scores. The
    gradient of ``hidden_KH`` is already summed over the group. The gradient of the entropy (`learns_entropy`) costs
    another pass over the probabilities. Tokens that are `undrawable` have probability zero, and so
    have those outside of a target's mask in `masks`.
    """
    chunk = rows_at_once(len(hidden_KH), weight_VH) if chunk is None else chunk
    keeps = torch.is_grad_enabled() and len(hidden_KH) <= chunk
    token_KN = target_K[:, None]
    if others_KN is not None:
        token_KN = torch.cat([token_KN, others_KN], dim=1)
    scores: tuple[torch.Tensor, ...] = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden_KH, weight_VH, token_KN, temperature, vocabulary, chunk, keeps, learns_entropy, tuple(undrawable), masks
    )
    logprobs_KN, entropy_K, is_likeliest_K = scores
    # Copies: FSDP warns in every step of a view that a model returns, since a loss that changed it in place would lose
    # gradients.
    logprobs_K = logprobs_KN[:, 0].clone()
    if others_KN is None:
        return TokenScores(logprobs_K, entropy_K, is_likeliest_K)
    return StudentScores(logprobs_K, entropy_K, is_likeliest_K, logprobs_KN[:, 1:].clone())


def placed(values_K: torch.Tensor, is_there: torch.Tensor) -> torch.Tensor:
    """Place numbers, or rows of them, at the given positions in order, with zeros elsewhere."""
    rows = values_K.shape[1:]
    zeros = torch.zeros((*is_there.shape, *rows), dtype=values_K.dtype, device=is_there.device)
    return zeros.masked_scatter(is_there.view(*is_there.shape, *[1] * len(rows)), values_K)


def rows_at_once(num_tokens: int, weight_VH: torch.Tensor) -> int:
    """Return the tokens, of this many, whose logits may exist at once.

    Where all of them may, the backward pass need not compute them again. Otherwise fewer cost no time on a CPU, so they
    take about as much memory as what else a row of this length needs, or `_FEWEST`. On a GPU `_LOGITS` are little, and
    smaller matrix products slower.
    """
    num_rows, num_dimensions = weight_VH.shape
    num_logits = _LOGITS
    if num_tokens * num_rows > num_logits and not weight_VH.is_cuda:
        num_logits = min(num_logits, max(_FEWEST, _STATES * num_tokens * num_dimensions))
    return max(1, num_logits // num_rows)


def columns_at_once(num_logits: int, num_tokens: int) -> int:
    """Return the columns of which at most `num_logits` exist at once.

    Matrix products on a GPU take four times as long if rows do not begin at aligned addresses.
    """
    num_columns = max(1, num_logits // max(1, num_tokens))
    return num_columns if num_columns < _ALIGNED else num_columns // _ALIGNED * _ALIGNED


def find_rank_tokens(weight_VH: torch.Tensor, vocabulary: VocabularyShard | None) -> tuple[int, int]:
    """Return the first token of this rank's rows, and the number of them that are not padding."""
    num_rows = weight_VH.shape[0]
    first, size = (0, num_rows) if vocabulary is None else (vocabulary.first_row, vocabulary.num_rows)
    return first, max(0, min(num_rows, size - first))


class _Scores(torch.autograd.Function):
    """The scoring function. Forward goes over the tokens in chunks, and backward over the vocabulary.

    So each row of the weight's gradient is the result of one matrix product, not a sum of rounded ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: torch.Tensor,
        weight_VH: torch.Tensor,
        token_KN: torch.Tensor,
        temperature: float,
        vocabulary: VocabularyShard | None,
        chunk: int,
        keeps: bool,
        learns_entropy: bool,
        undrawable: tuple[int, ...],
        masks: TokenMasks | None,
    ) -> tuple[torch.Tensor, ...]:
        first, num_tokens = find_rank_tokens(weight_VH, vocabulary)
        row_KN = token_KN - first
        is_here_KN = (row_KN >= 0) & (row_KN < num_tokens)
        row_KN = row_KN.clamp(0, weight_VH.shape[0] - 1)

        logits_RV = None
        parts = []
        masks_of_chunks = itertools.repeat(None) if masks is None else masks.split(chunk)
        chunks = zip(torch.split(hidden_KH, chunk), torch.split(row_KN, chunk), masks_of_chunks, strict=False)
        for hidden_RH, row_RN, masks_R in chunks:
            logits_RV = None  # before the next are made
            logits_RV = logits_of(hidden_RH, weight_VH, temperature)
            if undrawable:
                rule_out(logits_RV, undrawable, first)
            if masks_R is not None:
                masks_R.rule_out(logits_RV, first)
            parts.append(_sums(logits_RV, row_RN, num_tokens))
        max_K, sum_K, weighted_K, *logit_NK = torch.cat(parts, dim=1)
        logit_KN = torch.stack(logit_NK, dim=1).where(is_here_KN, 0.0)

        scale_K = torch.ones_like(max_K)  # from this rank's largest logit to that of all ranks
        if vocabulary is not None:
            scale_K, sums_MK = _sum_over_ranks(vocabulary, max_K, sum_K, weighted_K, logit_KN, is_here_KN)
            sum_K, weighted_K, logit_KN = sums_MK[0], sums_MK[1], sums_MK[2:].T
        log_sum_K = sum_K.log()
        entropy_K = log_sum_K - weighted_K / sum_K

        exp_KV = logits_RV if keeps else None
        ctx.save_for_backward(
            hidden_KH, weight_VH, row_KN, is_here_KN, max_K, scale_K / sum_K, exp_KV, entropy_K.detach().clone()
        )
        ctx.temperature, ctx.vocabulary = temperature, vocabulary
        ctx.num_tokens, ctx.chunk, ctx.learns_entropy = num_tokens, chunk, learns_entropy
        ctx.undrawable, ctx.first, ctx.masks = undrawable, first, masks
        is_likeliest_K = (logit_KN[:, 0] == 0.0).float()  # relative to the largest, so zero for that one
        ctx.mark_non_differentiable(is_likeliest_K, *(() if learns_entropy else (entropy_K,)))
        return logit_KN - log_sum_K[:, None], entropy_K, is_likeliest_K

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_KH, weight_VH, row_KN, is_here_KN, max_K, scale_K, exp_KV, entropy_K = ctx.saved_tensors
        grad_KN = grads[0] / ctx.temperature
        of_entropy_K = grads[1] / ctx.temperature if ctx.learns_entropy else None
        spread_K = -grad_KN.sum(dim=1)
        grad_KN = grad_KN * is_here_KN
        grad_hidden_KH = torch.zeros(hidden_KH.shape, dtype=torch.float32, device=hidden_KH.device)
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = torch.empty_like(weight_VH)
            grad_weight_VH[ctx.num_tokens :] = 0.0
        # As many logits at once as in forward. Padding has no gradient.
        num_columns = columns_at_once(ctx.chunk * len(weight_VH), len(hidden_KH))
        for first in range(0, ctx.num_tokens, num_columns):
            columns = slice(first, min(first + num_columns, ctx.num_tokens))
            weight_CH = weight_VH[columns]
            # Kept ones are changed in place, so that the largest tensor of a step exists only once.
            exp_KC = _exponentials(ctx, hidden_KH, weight_CH, max_K, first) if exp_KV is None else exp_KV[:, columns]
            # The gradient of log p[token] by the logits: one-hot(token) - p.
            if of_entropy_K is None:
                grad_KC = exp_KC.mul_((spread_K * scale_K)[:, None])
            else:
                grad_KC = _add_entropy_gradient(exp_KC.mul_(scale_K[:, None]), spread_K, of_entropy_K, entropy_K)
            column_KN = row_KN - first
            is_inside_KN = (column_KN >= 0) & (column_KN < len(weight_CH))
            grad_KC.scatter_add_(1, column_KN.clamp(0, len(weight_CH) - 1), grad_KN * is_inside_KN)
            rounded_KC = grad_KC.to(weight_VH.dtype)
            grad_hidden_KH += rounded_KC @ weight_CH
            if grad_weight_VH is not None:
                torch.mm(rounded_KC.T, hidden_KH, out=grad_weight_VH[columns])
            del exp_KC, grad_KC, rounded_KC  # before the next are made
        grad_hidden_KH = grad_hidden_KH.to(hidden_KH.dtype)
        if ctx.vocabulary is not None:
            dist.all_reduce(grad_hidden_KH, group=ctx.vocabulary.group)
        return grad_hidden_KH, grad_weight_VH, *[None] * 8


def _exponentials(
    ctx: Any, hidden_KH: torch.Tensor, weight_CH: torch.Tensor, max_K: torch.Tensor, first: int
) -> torch.Tensor:
    """Return the exponentials of the logits from row `first` of the weight on, relative to the largest of each token.

    No other name may hold them: the next would be made while they still exist.
    """
    logits_KC = logits_of(hidden_KH, weight_CH, ctx.temperature)
    if ctx.undrawable:
        rule_out(logits_KC, ctx.undrawable, ctx.first + first)
    if ctx.masks is not None:
        ctx.masks.rule_out(logits_KC, ctx.first + first)
    return logits_KC.sub_(max_K[:, None]).exp_()


def _sum_over_ranks(
    vocabulary: VocabularyShard,
    max_K: torch.Tensor,
    sum_K: torch.Tensor,
    weighted_K: torch.Tensor,
    logit_KN: torch.Tensor,
    is_here_KN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale from this rank's largest logit to that of all ranks, and the sums over these. Collective."""
    whole_max_K = max_K.clone()
    dist.all_reduce(whole_max_K, dist.ReduceOp.MAX, vocabulary.group)
    lower_K = max_K - whole_max_K
    scale_K = lower_K.exp()
    sums_MK = torch.stack(
        [
            sum_K * scale_K,
            (weighted_K + lower_K * sum_K) * scale_K,
            *(logit_KN + lower_K[:, None] * is_here_KN).unbind(dim=1),
        ]
    )
    dist.all_reduce(sums_MK, group=vocabulary.group)
    return scale_K, sums_MK


def _add_entropy_gradient(
    p_KC: torch.Tensor, spread_K: torch.Tensor, of_entropy_K: torch.Tensor, entropy_K: torch.Tensor
) -> torch.Tensor:
    """Return each logit's gradient, except for the tokens' own. That of the entropy is ``-p (log p + entropy)``.

    ``p log p`` is zero where ``p`` is.
    """
    log_KC = torch.special.xlogy(p_KC, p_KC).mul_(-of_entropy_K[:, None])
    return p_KC.mul_((spread_K - of_entropy_K * entropy_K)[:, None]).add_(log_KC)


def _sums(logits_RV: torch.Tensor, row_RN: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return for each token the largest logit and, relative to it, the terms of the scores.

    With ``x`` the logits minus their largest, ``[3 + N, R]`` holds that largest, the sums of ``exp(x)`` and ``x
    exp(x)``, and ``x`` at the rows ``row_RN``. The logits are overwritten with the exponentials.
    """
    logits_RV[:, num_tokens:] = NEVER
    size = max(1, len(logits_RV) if logits_RV.is_cuda else _CACHED // logits_RV.shape[1])
    parts = []
    for logits_BV, row_BN in zip(torch.split(logits_RV, size), torch.split(row_RN, size), strict=True):
        max_B = logits_BV.amax(dim=1)
        below_BV = logits_BV - max_B[:, None]
        of_rows_BN = below_BV.gather(1, row_BN)
        exp_BV = torch.exp(below_BV, out=logits_BV)
        sums_B = max_B, exp_BV.sum(dim=1), below_BV.mul_(exp_BV).sum(dim=1)
        parts.append(torch.stack([*sums_B, *of_rows_BN.unbind(dim=1)]))
    return torch.cat(parts, dim=1)


def logits_of(hidden_RH: torch.Tensor, weight_CH: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits in float32, in memory of their own."""
    logits_RC = (hidden_RH @ weight_CH.T).float()
    return logits_RC if temperature == 1.0 else logits_RC.div_(temperature)
