"""Megatron-Core's pipeline schedules over micro-batches, with this project's losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from tandem.refit.adapters.megatron import Megatron
from tandem.trainer.backends.megatron.model import LayerChunk, ScalarChunk
from tandem.trainer.backends.megatron.rows import MegatronRow, rows_of
from tandem.trainer.batching.masks import masked_scores
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scorers.likeliest import first_of, judged, top_tokens
from tandem.trainer.scores import JudgedTokens, Scores, StudentScores, TokenScores, TokenValues, TopTokens
from tandem.trainer.scoring import VocabularyShard, placed, score_tokens

Scored = Callable[[MicroBatch, Any], torch.Tensor]
"""A function from a micro-batch and the model's scores to a scalar, called once for each on the last stage."""


class ModelPipeline:
    """One model's chunks on this rank. Every method is collective over the ranks of a replica."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        sizes: Megatron,
        num_tokens: int,
        temperature: float,
        *,
        num_likeliest: int = 0,
        judged_by: str = "",
        learns_entropy: bool = False,
        needs_whole: bool = False,
        media: Callable[[MegatronRow, torch.nn.Module], dict[str, Any]] | None = None,
        undrawable: Sequence[int] = (),
        score: Callable[..., TokenScores | StudentScores] = score_tokens,
        row_divisor: int = 1,
    ) -> None:
        """Take the chunks and their sizes.

        Args:
            chunks: `LayerChunk` objects, bare or in Megatron-Core's wrappers.
            sizes: parallel sizes of the program.
            num_tokens: size of the vocabulary, without padding.
            temperature: sampling temperature.
            num_likeliest: number of likeliest tokens that are returned at each position; 0 to return scores of the
                tokens themselves.
            judged_by: with likeliest tokens, what the model's trustworthiness is judged by; empty for nothing.
            learns_entropy: whether the entropy has a gradient.
            needs_whole: whether the loss also reads log-probabilities without sampling masks where there are any.
            media: what gives a chunk its inputs beside a row's tokens, if it takes any.
            undrawable: tokens that have no probability, as in engines.
            score: `score_tokens`, or what does the same.
            row_divisor: divisor of the length of rows, as in `rows_of`.
        """
        self.row_divisor = row_divisor
        self._media, self._undrawable, self._score_tokens = media, tuple(undrawable), score
        self._num_likeliest, self._learns_entropy, self._needs_whole = num_likeliest, learns_entropy, needs_whole
        self._judged_by = judged_by
        self._chunks = list(chunks)
        self._last: LayerChunk = unwrap_model(self._chunks[-1])
        self._sizes = sizes
        self._num_tokens = num_tokens
        self._temperature = temperature
        self._is_sequence_parallel = self._last.config.sequence_parallel

    def rows(self, batches: Sequence[MicroBatch]) -> list[MegatronRow]:
        """Return this rank's share of the micro-batches, as `run` takes them."""
        sizes = self._sizes
        rank = parallel_state.get_context_parallel_rank()
        has_virtual = sizes.vpp > 1
        round_to = sizes.pp if has_virtual else 1
        return rows_of(batches, rank, sizes.cp, round_to=round_to, equal=has_virtual, divisor=self.row_divisor)

    def run(
        self, rows: Sequence[MegatronRow], scored: Scored, *, scale: float = 1.0, forward_only: bool = False
    ) -> None:
        """Go forward, and unless `forward_only` backward, over the rows; call `scored` for each on the last stage.

        The gradient is that of `scale` times the sum of the results of `scored`, summed over ranks and divided by the
        number of tokens of all rows of all ranks.
        """
        score = functools.partial(self._score, scored=scored, scale=scale)

        def step(iterator: Iterator[MegatronRow], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            row = next(iterator)
            inputs: dict[str, Any] = {"position_ids": row.position_ids_1M}
            if self._media is not None:
                inputs |= self._media(row, chunk)
            hidden = chunk(row.token_ids_1M, **inputs, attention_mask=None, packed_seq_params=row.sequences)
            return hidden, functools.partial(score, row)

        iterators = [iter(rows) for _ in self._chunks]
        has_virtual = len(self._chunks) > 1
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if has_virtual else iterators[0],
            model=self._chunks if has_virtual else self._chunks[0],
            num_microbatches=len(rows),
            seq_length=rows[0].token_ids_1M.shape[1] * self._sizes.cp,  # read only if all rows are of equal length
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _score(
        self, row: MegatronRow, hidden: torch.Tensor, *, scored: Scored, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return the loss, the row's tokens on this rank, and an empty report, as the schedules require."""
        num_tokens = torch.tensor(row.token_ids_1M.numel(), dtype=torch.int, device=hidden.device)
        if row.batch is None:
            return (hidden * 0.0).sum(), num_tokens, {}
        if self._is_sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        valid_BT = row.batch.loss_mask_BT
        scores = self._score_states(row, row.batch, hidden[:, 0].index_select(0, row.predictor_L))
        scores_K = [self._of_all_ranks(values_L, row, int(valid_BT.sum())) for values_L in scores]
        scores_BT = type(scores)(*(placed(values_K, valid_BT) for values_K in scores_K))
        return scored(row.batch, scores_BT) * scale, num_tokens, {}

    def blank(self, batch: MicroBatch) -> Scores:
        """Return the scores of a micro-batch that is only scored, without the values."""
        shape = batch.token_ids_BT.shape
        like = functools.partial(torch.empty, device=batch.token_ids_BT.device)
        if self._num_likeliest:
            rows = (*shape, self._num_likeliest)
            top = TopTokens(like(rows, dtype=torch.float32), like(rows, dtype=torch.int32))
            return JudgedTokens(*top, like((*shape, 1), dtype=torch.float32)) if self._judged_by else top
        says = TokenValues if isinstance(self._last, ScalarChunk) else TokenScores
        return says(*(like(shape, dtype=torch.float32) for _ in says._fields))

    def _score_states(self, row: MegatronRow, batch: MicroBatch, hidden_LE: torch.Tensor) -> Scores:
        """Return the head's output for hidden states, each of which predicts a valid token, on this rank."""
        if isinstance(self._last, ScalarChunk):
            return TokenValues(self._last.head(hidden_LE)[:, 0].float())
        weight_VE, vocabulary = self._output_layer()
        others_BTN, top = batch.teacher_topk_ids_BTN, None
        others_LN = None if others_BTN is None else others_BTN[batch.loss_mask_BT][row.valid_L].long()
        if self._num_likeliest:
            top = top_tokens(
                hidden_LE,
                weight_VE,
                self._num_likeliest,
                temperature=self._temperature,
                vocabulary=vocabulary,
                undrawable=self._undrawable,
            )
            if not self._judged_by:
                return top
            others_LN = first_of(top)
        score = functools.partial(
            self._score_tokens,
            hidden_LE,
            weight_VE,
            batch.token_ids_BT[batch.loss_mask_BT][row.valid_L],
            temperature=self._temperature,
            vocabulary=vocabulary,
            others_KN=others_LN,
            learns_entropy=self._learns_entropy,
            undrawable=self._undrawable,
        )
        if top is not None:
            return judged(top, score(), self._judged_by)
        if batch.masks is None:
            return score()
        return masked_scores(score, batch.masks.take(row.valid_L), needs_whole=self._needs_whole)

    def _output_layer(self) -> tuple[torch.Tensor, VocabularyShard | None]:
        """Return this rank's rows of the output layer and their range; None for the range if it has all rows."""
        weight_VE = self._last.output_weight
        if self._sizes.tp == 1:
            # A view would have a gradient that is copied into the whole one.
            return weight_VE if len(weight_VE) == self._num_tokens else weight_VE[: self._num_tokens], None
        first_row = parallel_state.get_tensor_model_parallel_rank() * len(weight_VE)
        group = parallel_state.get_tensor_model_parallel_group()
        return weight_VE, VocabularyShard(group=group, first_row=first_row, num_rows=self._num_tokens)

    def _of_all_ranks(self, values_L: torch.Tensor, row: MegatronRow, num_valid: int) -> torch.Tensor:
        """Return ``[K]`` values, each from the rank of context parallelism that has its predictor.

        Every rank computes the same loss from them, and keeps the gradients of its own values.
        """
        if self._sizes.cp == 1:
            return values_L
        zeros_K = torch.zeros((num_valid, *values_L.shape[1:]), dtype=values_L.dtype, device=values_L.device)
        values_K = zeros_K.index_put((row.valid_L,), values_L)
        group = parallel_state.get_context_parallel_group()
        whole_K: torch.Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(values_K, group=group)
        return whole_K
