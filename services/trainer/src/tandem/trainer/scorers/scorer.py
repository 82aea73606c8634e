"""The scorers of tokens: of any model, and of a language model, by its output layer.

Models that change what their output layer says are scored from whole logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tandem.common.attention.segments import find_boundaries
from tandem.common.errors import ModelError
from tandem.trainer.batching.masks import NEVER, TokenMasks, masked_scores
from tandem.trainer.context import inputs_of_share, sum_shares
from tandem.trainer.micro_batches import MediaInputs, MicroBatch, TokenRow
from tandem.trainer.routing import RoutingReplay, experts_of
from tandem.trainer.scores import Scores, StudentScores, TokenScores
from tandem.trainer.scoring import VocabularyShard, placed, score_tokens

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


class HeadTask(NamedTuple):
    """The arguments of a head."""

    predictor_K: torch.Tensor
    """The tokens that it takes hidden states of."""
    target_K: torch.Tensor
    """The tokens that these predict."""
    others_KN: torch.Tensor | None
    """Other tokens that are scored in the place of each; None for none."""
    masks: TokenMasks | None = None
    """Their sampling masks; None for the whole vocabulary."""

    def take(self, is_taken_K: torch.Tensor) -> HeadTask:
        """Return the arguments for some of the tokens."""
        others_KN = None if self.others_KN is None else self.others_KN[is_taken_K]
        masks = None if self.masks is None else self.masks.take(is_taken_K)
        return HeadTask(self.predictor_K[is_taken_K], self.target_K[is_taken_K], others_KN, masks)


class ModelScorer:
    """A model's scores of valid tokens. Its head sees only the positions before such tokens.

    The scores of each token are a tuple of numbers, or of rows of numbers.
    """

    compiles_attention = False
    """Whether attention is part of compiled layers, so that it takes nothing but tensors."""

    def __init__(
        self,
        model: Any,
        head: Any,
        context: dist.ProcessGroup | None,
        replay: RoutingReplay | None = None,
        media: MediaInputs | None = None,
    ) -> None:
        """Take a model that is already sharded; `context` are the ranks that share each sequence with this one.

        `replay` is given the experts of the tokens of each micro-batch. `media` gives what the model takes besides the
        tokens.
        """
        self.model = model
        self._context = context
        self._replay = replay
        self._media = media
        self._task: HeadTask | None = None
        weight = head.weight
        self._is_cut = isinstance(weight, DTensor) and "tensor" in (weight.device_mesh.mesh_dim_names or ())
        head.register_forward_pre_hook(self._pick)

    def __call__(self, batch: MicroBatch) -> Any:
        """Return the model's scores, ``[B, T]`` or ``[B, T, N]`` each, zero for tokens that are not valid.

        Position ``t`` holds the score of token ``t`` given the tokens before it.
        """
        valid_BT, others_BTN = batch.loss_mask_BT, batch.teacher_topk_ids_BTN
        inputs, predictor_K = self._inputs(batch)
        others_KN = None if others_BTN is None else others_BTN[valid_BT].long()
        task = HeadTask(predictor_K, batch.token_ids_BT[valid_BT], others_KN, batch.masks)
        if self._replay is not None:
            self._replay.give(experts_of(batch, self._context))
        if self._media is not None:
            inputs |= self._media(batch)
        self._task = task if self._context is None else task.take(predictor_K >= 0)
        try:
            scores_K: Any = self._scores(inputs, self._task)
        finally:
            self._task = None
        kind = type(scores_K)
        if self._context is not None:
            scores_K = [sum_shares(placed(each_K, predictor_K >= 0), self._context) for each_K in scores_K]
        return kind(*(placed(each_K, valid_BT) for each_K in scores_K))

    def _inputs(self, batch: MicroBatch) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the model's inputs, and the token that predicts each valid one, -1 if another rank has that.

        There is no attention mask: attention is causal, and a mask would rule out the fast kernels.
        """
        if self._context is not None:
            return inputs_of_share(batch, self._context)
        if batch.row is not None:
            row = batch.row
            attended = {"ends_2S": _ends_of(row)} if self.compiles_attention else {"row": row}
            return {"input_ids": row.token_ids_1N, "position_ids": row.position_ids_1N, **attended}, row.predictor_K
        inputs = {"input_ids": batch.token_ids_BT}
        if self._is_cut:  # the activations may be shorter than the sequence
            inputs["position_ids"] = torch.arange(batch.token_ids_BT.shape[1], device=batch.token_ids_BT.device)[None]
        return inputs, batch.loss_mask_BT.flatten().nonzero()[:, 0] - 1

    def _scores(self, inputs: dict[str, Any], task: HeadTask) -> Scores:
        """Return the model's scores of the targets."""
        raise NotImplementedError

    def _pick(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return None if self._task is None else (inputs[0].flatten(0, 1).index_select(0, self._task.predictor_K),)


def _ends_of(row: TokenRow) -> torch.Tensor:
    """Return the ends of a packed row's segments, as compiled attention takes them."""
    return find_boundaries(tuple((length, length) for length in row.lengths), row.token_ids_1N.device)


class TokenScorer(ModelScorer):
    """Log-probabilities and entropies of a language model, at the sampling temperature.

    With a large vocabulary the output layer is the most expensive one, so it sees only the positions that predict a
    valid token. If it is only a matrix product, it returns their scores in place of logits, which then never all exist
    at once. This happens in its own forward pass, because a sharded weight is whole there. If tensor parallelism has
    divided it, each rank works on its own rows.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        *,
        linear_head: bool,
        context: dist.ProcessGroup | None = None,
        learns_entropy: bool = False,
        needs_whole: bool = False,
        replay: RoutingReplay | None = None,
        media: MediaInputs | None = None,
        undrawable: Sequence[int] = (),
        score: Callable[..., TokenScores | StudentScores] = score_tokens,
    ) -> None:
        """Begin, as any scorer. Raise `ModelError` if the model is divided so that it cannot be scored.

        `linear_head` is the result of `has_linear_head` before sharding, `learns_entropy` whether the entropy has a
        gradient, `needs_whole` whether the loss also reads log-probabilities without sampling masks where there are
        any. Tokens that are `undrawable` have no probability, as in engines. `score` is
        `score_tokens`, or what does the same.
        """
        self._undrawable = tuple(undrawable)
        self._score_tokens = score
        self._temperature, self._learns_entropy, self._needs_whole = temperature, learns_entropy, needs_whole
        self._gives_logits = not linear_head
        head = model.get_output_embeddings()
        super().__init__(model, head, context, replay, media)
        if self._gives_logits and self._is_cut:
            raise ModelError(f"{type(model).__name__} changes its logits, so its output layer cannot be cut over ranks")
        if not self._gives_logits:
            head.forward = functools.partial(self._score, head, head.forward)

    def _scores(self, inputs: dict[str, Any], task: HeadTask) -> Scores:
        output: Any = self.model(**inputs, use_cache=False).logits
        if self._gives_logits:
            return self._of_logits(exclude_tokens(output.float() / self._temperature, self._undrawable), task)
        scores: Scores = output
        return scores

    def _score(
        self, head: Any, forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor | Scores:
        if self._task is None:
            return forward(hidden)
        weight_VH, vocabulary = head.weight, None
        if isinstance(weight_VH, DTensor):
            group = weight_VH.device_mesh.get_group()
            _, (first_row, _) = compute_local_shape_and_global_offset(
                weight_VH.shape, weight_VH.device_mesh, weight_VH.placements
            )
            vocabulary = VocabularyShard(group=group, first_row=first_row, num_rows=weight_VH.shape[0])
            weight_VH = weight_VH.to_local(grad_placements=weight_VH.placements)
        return self._of_hidden(hidden, weight_VH, vocabulary, self._task)

    def _of_hidden(
        self, hidden_KH: torch.Tensor, weight_VH: torch.Tensor, vocabulary: VocabularyShard | None, task: HeadTask
    ) -> Scores:
        score = functools.partial(
            self._score_tokens,
            hidden_KH,
            weight_VH,
            task.target_K,
            temperature=self._temperature,
            vocabulary=vocabulary,
            others_KN=task.others_KN,
            learns_entropy=self._learns_entropy,
            undrawable=self._undrawable,
        )
        return score() if task.masks is None else masked_scores(score, task.masks, needs_whole=self._needs_whole)

    def _of_logits(self, logits_KV: torch.Tensor, task: HeadTask) -> Scores:
        score = functools.partial(
            scores_of_logits, logits_KV, task.target_K, task.others_KN, learns_entropy=self._learns_entropy
        )
        return score() if task.masks is None else masked_scores(score, task.masks, needs_whole=self._needs_whole)
