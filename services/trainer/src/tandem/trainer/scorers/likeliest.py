"""The likeliest tokens at each position, as a teacher gives them to its student.

Shapes are those of `tandem.trainer.scoring`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tandem.trainer.batching.masks import NEVER, rule_out
from tandem.trainer.scorers.scorer import Pictures, Task, TokenScorer
from tandem.trainer.scores import Scores, TopTokens
from tandem.trainer.scoring import VocabularyShard, logits_of, own_tokens, rows_at_once


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
        pictures: Pictures | None = None,
        undrawable: Sequence[int] = (),
    ) -> None:
        """Begin, as a scorer of tokens; `num` is the number of likeliest tokens."""
        super().__init__(
            model, temperature, linear_head=linear_head, context=context, pictures=pictures, undrawable=undrawable
        )
        self._num = num

    def _of_hidden(
        self, hidden_KH: torch.Tensor, weight_VH: torch.Tensor, vocabulary: VocabularyShard | None, task: Task
    ) -> Scores:
        return top_tokens(
            hidden_KH,
            weight_VH,
            self._num,
            temperature=self._temperature,
            vocabulary=vocabulary,
            undrawable=self._undrawable,
        )

    def _of_logits(self, logits_KV: torch.Tensor, task: Task) -> Scores:
        return top_of_logits(logits_KV, self._num)


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
    chunk = rows_at_once(weight_VH) if chunk is None else chunk
    first, num_tokens = own_tokens(weight_VH, vocabulary)
    parts = []
    for hidden_RH in torch.split(hidden_KH, chunk):
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
