"""The likeliest tokens at each position, as a teacher gives them to its student.

Shapes are those of `tandem.trainer.scoring`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tandem.trainer.batching.masks import NEVER, rule_out
from tandem.trainer.micro_batches import MediaInputs
from tandem.trainer.scorers.scorer import HeadTask, TokenScorer
from tandem.trainer.scores import JudgedTokens, Scores, StudentScores, TopTokens
from tandem.trainer.scoring import VocabularyShard, find_rank_tokens, logits_of, rows_at_once


class TopScorer(TokenScorer):
    """Scores a language model's likeliest tokens and their logits in the same way."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        *,
        num: int,
        linear_head: bool,
        context: dist.ProcessGroup | None = None,
        media: MediaInputs | None = None,
        undrawable: Sequence[int] = (),
        judged_by: str = "",
    ) -> None:
        """Begin, as a scorer of tokens; `num` is the number of likeliest tokens.

        With `judged_by` (``weighs_teachers_by``) it also says how far the model is to be trusted.
        """
        super().__init__(
            model, temperature, linear_head=linear_head, context=context, media=media, undrawable=undrawable
        )
        self._num, self._judged_by = num, judged_by

    def _of_hidden(
        self, hidden_KH: torch.Tensor, weight_VH: torch.Tensor, vocabulary: VocabularyShard | None, task: HeadTask
    ) -> Scores:
        top = top_tokens(
            hidden_KH,
            weight_VH,
            self._num,
            temperature=self._temperature,
            vocabulary=vocabulary,
            undrawable=self._undrawable,
        )
        if not self._judged_by:
            return top
        scores = super()._of_hidden(hidden_KH, weight_VH, vocabulary, task._replace(others_KN=first_of(top)))
        return judged(top, scores, self._judged_by)

    def _of_logits(self, logits_KV: torch.Tensor, task: HeadTask) -> Scores:
        top = top_of_logits(logits_KV, self._num)
        if not self._judged_by:
            return top
        return judged(top, super()._of_logits(logits_KV, task._replace(others_KN=first_of(top))), self._judged_by)


def first_of(top: TopTokens) -> torch.Tensor:
    """Return the likeliest token at each position, as tokens that are scored in its place."""
    return top.token_ids[:, :1].long()


def judged(top: TopTokens, scores: Scores, by: str) -> JudgedTokens:
    """Return the likeliest tokens with how far the model is to be trusted, as ``weighs_teachers_by`` says.

    `scores` are those of the tokens, and of `first_of` the likeliest in their places.
    """
    assert isinstance(scores, StudentScores), "other tokens are scored too"
    match by:
        case "ce":
            confidence_K = scores.logprobs
        case "entropy":
            confidence_K = -scores.entropy
        case _:
            confidence_K = scores.other_logprobs[:, 0].exp()
    return JudgedTokens(*top, confidence_K[:, None])


@torch.no_grad()
def top_tokens(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    num: int,
    *,
    temperature: float,
    vocabulary: VocabularyShard | None = None,
    chunk: int | None = None,
    undrawable: Sequence[int] = (),
) -> TopTokens:
    """Return the `num` likeliest tokens at each position, with the arguments of `score_tokens`.

    Each rank of a vocabulary's group finds those of its own rows, and the best of all are the result.
    """
    chunk = rows_at_once(len(hidden_KH), weight_VH) if chunk is None else chunk
    first, num_tokens = find_rank_tokens(weight_VH, vocabulary)
    parts = []
    logits_RV = None
    for hidden_RH in torch.split(hidden_KH, chunk):
        logits_RV = None  # before the next are made
        logits_RV = logits_of(hidden_RH, weight_VH, temperature)
        logits_RV[:, num_tokens:] = NEVER
        if undrawable:
            rule_out(logits_RV, undrawable, first)
        parts.append(logits_RV.topk(min(num, logits_RV.shape[1]), dim=1))
    logits_KN, row_KN = (torch.cat(each) for each in zip(*parts, strict=True))
    token_KN = row_KN + first
    if vocabulary is not None:
        logits_KN, token_KN = (_of_all_ranks(each, vocabulary.group) for each in (logits_KN, token_KN))
        logits_KN, place_KN = logits_KN.topk(num, dim=1)
        token_KN = token_KN.gather(1, place_KN)
    return TopTokens(logits_KN, token_KN.int())


def top_of_logits(logits_KV: torch.Tensor, num: int) -> TopTokens:
    """Return the same from whole logits."""
    logits_KN, token_KN = logits_KV.topk(num, dim=1)
    return TopTokens(logits_KN, token_KN.int())


def _of_all_ranks(values_KN: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the columns of all ranks side by side. All ranks have equally many."""
    parts = [torch.empty_like(values_KN) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values_KN.contiguous(), group=group)
    return torch.cat(parts, dim=1)
