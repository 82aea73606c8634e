"""A rank's share of a batch: the sequences each model works on here, and what losses read of them.

What a model says of tokens is brought to the policy's ranks, and what else its loss reads to those of a model that is
trained: within the ranks that hold both (`tandem.trainer.portions`), and between processes that hold different models
(`tandem.trainer.exchange`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.assignment import batches_of_samples
from tandem.common.batch import Batch, Float32s
from tandem.common.columns import TEACHER, Column, Model, Source
from tandem.common.config import Config
from tandem.common.dotted import named
from tandem.common.routed_experts import RoutedExperts, replayed_experts
from tandem.trainer import packing
from tandem.trainer.advantages import Finisher, Scored
from tandem.trainer.backend import Backend
from tandem.trainer.batching import Batching
from tandem.trainer.exchange import BatchExchange, Exchange
from tandem.trainer.logprob_errors import kept_sequences, mult_prob_errors
from tandem.trainer.losses import Counts, Loss
from tandem.trainer.packing import Columns, MicroBatch
from tandem.trainer.portions import Portion
from tandem.trainer.scoring import Scores
from tandem.trainer.set_aside import BY_LOSS, not_finite, num_groups, of_groups, sample_named, set_aside_note
from tandem.trainer.sharing import Prompts

_SCORING: dict[Model, str] = {
    "policy": "logprobs",
    "reference": "reference_logprobs",
    "value": "values",
    "teacher": "teacher_logprobs",
}
"""What the time is called that a model takes to score a batch."""
NUMBERS = ("num_valid_tokens", "num_valid_samples")
"""Metrics that are no means."""


class Share:
    """This rank's share of a batch; rows are those of the whole batch's table."""

    def __init__(
        self,
        backend: Backend,
        table: Batch,
        batch: Batch,
        config: Config,
        exchange: Exchange | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self._exchange = None if exchange is None else BatchExchange(exchange, table, config)
        models = config.declaration.holds(config) if exchange is None else exchange.world.models
        own = None if self._exchange is None else self._exchange.portion(backend, batch)
        self._portions = _portions(backend, table, batch, config, models) if own is None else {models[0]: own}
        self._cuts = {model: _Cut.of(model, backend, each, config) for model, each in self._portions.items()}
        self._moved: dict[tuple[Model, Column], NDArray[Any]] = {}
        """Columns as models read them that divide the ranks otherwise than the policy."""
        self.policy_logprobs_T: Float32s | None = None
        """Of its tokens, under the policy; None until a pass of its own has computed them."""
        self.metrics: dict[str, float] = {}
        """What the making of advantages tells."""
        self.notes: list[str] = []
        """Which groups were set aside, and why."""
        self._table = table
        self._counted_S = table.num_counted_S
        self._rewards_S = table.rewards_S
        self._teacher_S = table.columns.get(f"{TEACHER}_S", np.zeros(len(table), dtype=np.int32))
        size = config.policy.train_global_batch_size * config.sequences_per_sample
        self.global_batches = batches_of_samples(table.branch_S, size)

    def holds(self, model: Model) -> bool:
        """Tell whether this rank has its part of a model."""
        return model in self._portions

    @property
    def _batch(self) -> Batch:
        """What the policy works on here."""
        return self._portions["policy"].batch

    def counts(self, rows: Sequence[int]) -> Counts:
        """Return what the means over these sequences of all ranks divide by."""
        counted = self._counted_S[list(rows)]
        positive = int(counted[self._rewards_S[list(rows)] > 0].sum())
        return Counts(tokens=int(counted.sum()), sequences=int((counted > 0).sum()), positive_tokens=positive)

    def numbers(self) -> dict[str, float]:
        """Return how much there is of the whole batch."""
        parts = [numbers_of(self.config, self.counts(rows)) for rows in self.global_batches]
        return {name: sum(part[name] for part in parts) for name in NUMBERS}

    def micro_batches(self, rows: Sequence[int], columns: Columns, model: Model = "policy") -> list[MicroBatch]:
        """Return this rank's micro-batches of a global batch that a model is trained on, with what its loss reads."""
        own = self._read_by(model, columns)
        return [self._pad(group, model, own) for group in self._cuts[model].batching.training(rows)]

    def set_aside(self, loss: Loss, rows: Sequence[int], columns: Columns, model: Model) -> bool:
        """Have no group of these sequences count whose part of a model's loss is not finite; tell whether others do.

        Nothing changes where there are no groups, none is found, or no other is left: then it is no sample's doing.
        Collective.
        """
        if not self.config.declaration.rolls_out:
            return False
        found_S = torch.zeros(len(self._counted_S), dtype=torch.float64)
        portion = self._portions[model]
        for micro_batch, scores in self.scored(model, columns=self._read_by(model, columns)):
            for place in not_finite(loss, micro_batch, scores):
                found_S[portion.rows[place]] = 1
        wild_S = portion.replicas.sum(found_S).cpu().numpy() > 0
        in_step_S = np.isin(np.arange(len(wild_S)), list(rows)) & (self._counted_S > 0)
        kept_S = ~of_groups(wild_S & in_step_S, self._table)
        if kept_S.all() or not (kept_S & in_step_S).any():
            return False
        first = sample_named(self._table, int((wild_S & in_step_S).argmax()))
        aside = set_aside_note(kept_S, self._table)
        self.notes.append(f"{first} has a loss or gradient that is no finite number: {aside}")
        self.metrics[BY_LOSS] = self.metrics.get(BY_LOSS, 0.0) + num_groups(kept_S, self._table)
        self._counted_S = np.where(kept_S, self._counted_S, 0)
        for each in self._portions.values():
            each.keep(kept_S)
        return True

    def _read_by(self, model: Model, columns: Columns) -> Columns:
        """Return what a model's loss reads of each token of its own sequences."""
        read = {
            each: self.config.declaration.columns_of(self.config, self._num_steps, each)
            for each in self.config.declaration.trains
        }
        others = {column for found in read.values() for column in found} - set(read[model])
        return {
            column: self._column_for(model, column, values_T)
            for column, values_T in columns.items()
            if column not in others
        }

    def columns(self, seconds: dict[str, float], size: int | None = None) -> dict[Column, NDArray[Any]]:
        """Return what losses read of each token of the share; models score it in micro-batches of `size`.

        The time that takes is added to `seconds`: of a model with processes of its own, that of waiting for it.
        """
        scored_by = self.config.declaration.scored_by(self.config, self._num_steps)
        scores: dict[Column, NDArray[Any]] = {}
        for model in filter(self.holds, scored_by):
            with timed(seconds, _SCORING[model]):
                scores |= self.said(model, size)
        if self._exchange is None:
            return self._finished(scores)
        for world in self._exchange.elsewhere:
            said = [column for column in self._read if column.model == world.name]
            with timed(seconds, _SCORING[world.name]):
                scores |= self._exchange.columns(world.name, "policy", said, scores, self._own)
        columns = self._finished(scores) if self.holds("policy") else {}
        for world in self._exchange.elsewhere:
            if world.name in self.config.declaration.trains:
                assert self.config.largest_logprob_error is None, "who leaves sequences out trains the policy alone"
                read = [*self.config.declaration.columns_of(self.config, self._num_steps, world.name)]
                columns |= self._exchange.columns("policy", world.name, read, columns, self._own)
        return columns

    @property
    def _read(self) -> tuple[Column, ...]:
        """What the losses of all models read in this step."""
        return self.config.declaration.all_columns(self.config, self._num_steps)

    @property
    def _own(self) -> Portion:
        """What this rank works on: that of the policy, or where it does not hold it, of its only model."""
        return next(iter(self._portions.values()))

    def _finished(self, scores: dict[Column, NDArray[Any]]) -> dict[Column, NDArray[Any]]:
        """Return what losses read, from what all models say of the share's tokens."""
        first: dict[Source, Float32s] = {
            column.source: values_T for column, values_T in scores.items() if not column.number
        }
        self.policy_logprobs_T = first.get("policy")
        if (threshold := self.config.largest_logprob_error) is not None:
            self._leave_out(first["policy"], threshold)
        return self.columns_with(scores, first)

    def columns_with(
        self, columns: dict[Column, NDArray[Any]], scores: Mapping[Source, Float32s]
    ) -> dict[Column, NDArray[Any]]:
        """Return the same from what models say of the share's tokens: columns, and the first number of each model."""
        config = self.config
        path = config.declaration.finisher(config)
        if path:
            finish: Finisher = named(path)
            known = Scored(batch=self._batch, scores=scores, sum_over_ranks=self.backend.sum_over_ranks)
            made, metrics = finish(config, known)
            self.metrics |= metrics
            columns |= made
        for column in self._read:
            if column not in columns:
                columns[column] = self._batch.of_tokens(column.name)
        return columns

    def _leave_out(self, policy_T: Float32s, threshold: float) -> None:
        """Have no token count of sequences about which training and generation disagree by more. Collective."""
        errors_S = torch.zeros(len(self._counted_S), dtype=torch.float64)
        own = self._portions["policy"].rows
        errors_S[torch.from_numpy(own)] = torch.from_numpy(mult_prob_errors(self._batch, policy_T))
        errors = self.backend.sum_over_ranks(errors_S).cpu().numpy()
        kept_S, metrics = kept_sequences(errors, self._counted_S, self._rewards_S, threshold)
        self.metrics |= metrics
        self._counted_S = np.where(kept_S, self._counted_S, 0)
        for portion in self._portions.values():
            portion.keep(kept_S)

    def said(self, model: Model, size: int | None = None) -> dict[Column, NDArray[Any]]:
        """Return the columns of what a model says of the share's counted tokens; zeros elsewhere."""
        portion = self._portions[model]
        found = {column: self._nothing(column, portion) for column in self._read if column.model == model}
        for number in range(self.config.num_of(model)):
            for micro_batch, scores_BT in self.scored(model, size, number=number):
                for column, values_T in found.items():
                    packing.unpad_into(values_T, scores_BT[column.number], portion.batch, micro_batch.rows)
        return {column: portion.moved_to(self._own, values_T) for column, values_T in found.items()}

    def _nothing(self, column: Column, portion: Portion) -> NDArray[Any]:
        rows = () if column.num_each is None else (column.num_each(self.config),)
        return np.zeros((len(portion.batch.token_ids_T), *rows), dtype=column.dtype)

    def reported(self, loss: Loss, model: Model) -> dict[str, float]:
        """Return the means that a model's loss reports, over all ranks."""
        means = (self._portions[model].replicas.sum(loss.report.sums) / max(1, loss.report.count)).tolist()
        return dict(zip(loss.report.names, means, strict=True))

    def scored(
        self, model: Model, size: int | None = None, columns: Columns | None = None, number: int = 0
    ) -> list[tuple[MicroBatch, Scores]]:
        """Return all micro-batches of this rank, each with what a model says of it; of a teacher those it teaches."""
        taught = self._of_teacher(number) if self.config.num_of(model) > 1 else self.global_batches
        if not any(taught):
            return []
        groups = self._cuts[model].batching.scoring(taught, size)
        padded = [self._pad(group, model, columns) for group in groups]
        return list(zip(padded, self.backend.scores(padded, model, number), strict=True))

    def _of_teacher(self, number: int) -> list[list[int]]:
        """Return the sequences of each global batch that one of several teachers teaches."""
        is_taught_S = self._teacher_S == number
        return [[row for row in rows if is_taught_S[row]] for rows in self.global_batches]

    @property
    def _num_steps(self) -> int:
        return self.config.num_passes * len(self.global_batches)

    def _column_for(self, model: Model, column: Column, values_T: NDArray[Any]) -> NDArray[Any]:
        """Return a column of the policy's tokens as one of a model's."""
        key = model, column
        if key not in self._moved:
            self._moved[key] = self._own.moved_to(self._portions[model], values_T)
        return self._moved[key]

    def _pad(self, group: Sequence[int], model: Model, columns: Columns | None = None) -> MicroBatch:
        cut, portion = self._cuts[model], self._portions[model]
        return packing.pad(
            portion.batch,
            [portion.place_of[row] for row in group],
            divisible_by=cut.batching.divisible_by,
            row_divisible_by=cut.batching.row_divisible_by,
            device=self.backend.device,
            prompts=cut.prompts,
            columns=columns,
            experts=cut.experts,
        )


class _Cut(NamedTuple):
    """How a share is cut into the micro-batches of one model."""

    batching: Batching
    prompts: Prompts | None
    """None where the model is given no shared prompts."""
    experts: RoutedExperts | None
    """What it is to replay of each token; None for nothing."""

    @classmethod
    def of(cls, model: Model, backend: Backend, portion: Portion, config: Config) -> Self:
        """Return that of this rank, by the model's section."""
        settings, table, replicas = config.settings_of(model), portion.table, portion.replicas
        by_tokens = settings.sequence_packing.enabled or settings.dynamic_batching.enabled
        shares_prompts = settings.share_prompts and backend.shares_prompts and not by_tokens
        batching = Batching(
            settings,
            table.lengths_S,
            table.rank_S,
            rank=replicas.rank,
            num_ranks=replicas.size,
            sequence_divisor=replicas.sequence_divisor,
            prompt_S=table.prompt_S if shares_prompts else None,
            unit=config.sequences_per_sample,
        )
        prompts = Prompts.of(table.take(table.rows_of(replicas.rank))) if shares_prompts else None
        return cls(batching, prompts, replayed_experts(config, model))


def _portions(
    backend: Backend, table: Batch, batch: Batch, config: Config, models: Sequence[Model]
) -> dict[Model, Portion]:
    """Return what each of the models, the policy first, works on.

    It is the share, or what another division of the ranks makes of it. Collective.
    """
    policys = backend.replicas("policy")
    own = Portion(policys, table, batch)
    by_sizes = {policys.sizes: own}
    found: dict[Model, Portion] = {}
    for model in models:
        replicas = backend.replicas(model)
        if replicas.sizes not in by_sizes:
            by_sizes[replicas.sizes] = own.for_model(model, replicas, config)
        found[model] = by_sizes[replicas.sizes]
    return found


def numbers_of(config: Config, counts: Counts) -> dict[str, float]:
    """Return the metrics that say how much there is of a batch."""
    num_samples = counts.sequences // config.sequences_per_sample
    return {"num_valid_tokens": float(counts.tokens), "num_valid_samples": float(num_samples)}


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time that the block takes to the seconds of that name."""
    started = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
