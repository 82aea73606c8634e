"""Streaming training on a rank: the gradient of a step's groups as they come, then its optimizer step.

While the last groups of a step are generated, `StreamedGradient.add` computes the gradient of those that are there.
The loss is a mean over the tokens, or sequences, of the whole batch, whose number is not known yet. So the gradients
that add up are those of sums, and `StreamedGradient.train` divides them once, before they are clipped. This is exact
where the loss has one divisor (`tandem.config.checks.streaming`): g = (g_1 + ... + g_n) / N with the gradients g_i of
sums over some groups, and N tokens, or sequences, in all of them.

The table of the whole batch has the last word. Where it differs from what was streamed, because a group was generated
again or set aside, or where the optimizer step would not be finite, the gradient is dropped, and `tandem.trainer.step`
computes all of it: no weight has changed. Every rank has the same tables, and so decides the same.

Shapes: ``S`` sequences, ``T`` tokens of a rank's shard.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tandem.common.errors import NotFiniteError, OutlierError
from tandem.config import Config
from tandem.config.schema.columns import ALWAYS_TIMED, Model
from tandem.samples.batch import Float32s, Int64s, SampleBatch
from tandem.trainer import exposed_weights, step
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep, TrainerBackend
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.exchange import RankExchange
from tandem.trainer.losses import Counts, Report, make_loss
from tandem.trainer.rank_time import timed
from tandem.trainer.step import LogprobsOfRows, TrainingStep, TrainResult

_SUMS = Counts(tokens=1, sequences=1, positive_tokens=1)
"""The divisors of sums."""
_SAME = ("lengths_S", "num_valid_S", "rank_S", "advantages_S", "rewards_S")
"""Columns that the whole batch must have as they were streamed."""


class StreamedPart(NamedTuple):
    """Some groups whose gradient is there."""

    table: SampleBatch
    """Their table, the same on every rank."""
    samples: SampleBatch
    """This rank's sequences of them."""
    scored: list[LogprobsOfRows]
    """The policy's log-probabilities of these, if they are kept."""


class StreamedGradient:
    """The gradient of the groups of one step that are there before the others."""

    def __init__(self, backend: TrainerBackend, config: Config, *, keeps_logprobs: bool) -> None:
        """Take the backend of this rank; `keeps_logprobs` says whether `train` will be asked for them."""
        assert isinstance(backend, DTensorBackend), "the configuration's checks refuse others"
        self._backend, self._config, self._keeps_logprobs = backend, config, keeps_logprobs
        self._policy = backend.policy
        self._step = 0
        self._parts: list[StreamedPart] = []
        self._loss = 0.0
        """The sum of the losses so far, over all ranks."""
        self._report: Report | None = None
        """The sums to report so far, of this rank."""
        self._seconds = 0.0

    def begin(self, number: int) -> None:
        """Begin a step. What was added for another one is dropped; the same step goes on."""
        if number != self._step:
            self.forget()
            self._step = number

    def add(self, table: SampleBatch, samples: SampleBatch) -> int:
        """Add the gradient of some groups; return their valid tokens on all ranks. Collective.

        `table` is that of these groups alone, and `samples` are the sequences that it assigns to this rank.
        """
        started = time.perf_counter()
        self._add(table, samples, {})
        self._seconds += time.perf_counter() - started
        return int(table.num_valid_S.sum())

    def forget(self) -> None:
        """Drop the gradient."""
        self._policy.optimizer.zero_grad(set_to_none=True)
        self._parts, self._report = [], None
        self._loss = self._seconds = 0.0

    def train(
        self,
        backend: TrainerBackend,
        table: SampleBatch,
        samples: SampleBatch,
        config: Config,
        *,
        trained: Sequence[Model] | None = None,
        keeps_logprobs: bool = False,
        exchange: RankExchange | None = None,
    ) -> TrainResult:
        """Train on a whole batch, part of which was added before, as `tandem.trainer.step.train` does.

        Raises `TrainingError` as that does. The result's seconds are those from now on; the metric ``streamed_s`` has
        those before, and ``streamed_share`` the share of the batch's valid tokens that were added then.
        """
        train = partial(
            step.train,
            backend,
            table,
            samples,
            config,
            trained=trained,
            keeps_logprobs=keeps_logprobs,
            exchange=exchange,
        )
        rows = self._find_rows(table)
        if rows is None:
            self.forget()
            return mark_unstreamed(train())
        try:
            return self._finish(table, samples, rows)
        except (NotFiniteError, OutlierError):  # computed again, group by group, it can be named and set aside
            return mark_unstreamed(train())
        finally:
            self.forget()

    def _add(self, table: SampleBatch, samples: SampleBatch, seconds: dict[str, float]) -> None:
        """Add the gradient of a sum, and note what it was of. The times of other models are added to `seconds`."""
        batch = TrainingStep(self._backend, table, samples, self._config)
        columns = batch.filled(seconds)["policy"]
        loss, scored = make_loss(self._config, _SUMS, self._backend.device), list[LogprobsOfRows]()
        of_batch: LossOfMicroBatch = partial(step.keep_scores, scored, loss) if self._keeps_logprobs else loss
        micro_batches = batch.micro_batches(range(len(table)), columns)
        self._loss += self._policy.add_gradient(micro_batches, of_batch)
        self._parts.append(StreamedPart(table, samples, scored))
        if self._report is None:
            self._report = loss.report
        else:
            self._report.sums += loss.report.sums

    def _find_rows(self, table: SampleBatch) -> Int64s | None:
        """Return the rows of the batch that were added, part by part; None if there are none, or they differ."""
        row_of = {place: row for row, place in enumerate(_places_of(table))}
        rows: list[int] = []
        for part in self._parts:
            of_part = [row_of.get(place, -1) for place in _places_of(part.table)]
            if -1 in of_part:
                return None
            for name in _SAME:
                if not np.array_equal(table.columns[name][of_part], part.table.columns[name]):
                    return None
            rows += of_part
        return np.array(rows, dtype=np.int64) if rows else None

    def _finish(self, table: SampleBatch, samples: SampleBatch, rows: Int64s) -> TrainResult:
        """Add the gradient of the rest, and take the optimizer step. Raises `NotFiniteError` or `OutlierError`."""
        seconds = {"policy_training": 0.0, **dict.fromkeys(ALWAYS_TIMED, 0.0)}
        whole_step = TrainingStep(self._backend, table, samples, self._config)
        counts, all_rows = whole_step.counts(range(len(table))), np.arange(len(table))
        streamed = {
            "streamed_s": self._seconds,
            "streamed_share": float(table.num_valid_S[rows].sum() / max(1, counts.tokens)),
        }
        is_rest = ~np.isin(all_rows, rows)
        with timed(seconds, "policy_training"):
            if is_rest.any():
                of_rank = is_rest[whole_step.shard.rows]
                self._add(table.take(np.flatnonzero(is_rest)), samples.take(np.flatnonzero(of_rank)), seconds)
            is_mean_of_sequences = self._config.loss_fn.is_mean_of_sequences
            optimizer_step = self._step_optimizer(max(1, counts.sequences if is_mean_of_sequences else counts.tokens))
        for name in ALWAYS_TIMED:
            seconds["policy_training"] -= seconds[name]
        self._backend.advance_schedule("policy")
        assert self._report is not None, "something was added"
        report = Report(self._report.names, counts.tokens, self._backend.device)
        report.sums += self._report.sums
        means = (whole_step.shard.replicas.sum(report.sums) / max(1, report.count)).tolist()
        return TrainResult(
            metrics={
                **dict(zip(report.names, means, strict=True)),
                "loss": optimizer_step.loss,
                "grad_norm": optimizer_step.grad_norm,
                "learning_rate": optimizer_step.learning_rate,
                **whole_step.numbers([range(len(table))]),
                **streamed,
            },
            seconds=seconds,
            has_update=optimizer_step.grad_norm > 0 and optimizer_step.learning_rate > 0,
            logprobs=partial(_join_logprobs, samples, tuple(self._parts)) if self._keeps_logprobs else None,
        )

    def _step_optimizer(self, divisor: int) -> OptimizerStep:
        """Take an optimizer step with the gradient of the mean. Raises `NotFiniteError` or `OutlierError`."""
        policy = self._policy
        gradients = [
            exposed_weights.local_of(parameter.grad)
            for parameter in policy.parameters.values()
            if parameter.grad is not None
        ]
        if gradients:  # torch multiplies no empty list
            torch._foreach_mul_(gradients, 1.0 / divisor)
        max_grad_norm = self._config.policy.max_grad_norm
        optimizer_step = policy.take_step(self._loss / divisor, max_grad_norm, compared=policy.recent)
        policy.recent.add(optimizer_step.loss, optimizer_step.grad_norm)
        return optimizer_step


def mark_unstreamed(result: TrainResult) -> TrainResult:
    """Return the result of a step that was computed at once, after its last group."""
    result.metrics.update(streamed_s=0.0, streamed_share=0.0)
    return result


SequencePlace = tuple[str, int, int, int, int]
"""A sequence: the process that keeps it, the command that made it, its group, its place there, and its branch."""


def _places_of(table: SampleBatch) -> list[SequencePlace]:
    columns = (table.command_S, table.group_S, table.sample_S, table.branch_S)
    sources = [table.sources[source] for source in table.source_S.tolist()]
    return [*zip(sources, *(column.tolist() for column in columns), strict=True)]


def _join_logprobs(samples: SampleBatch, parts: Sequence[StreamedPart]) -> Float32s:
    """Return the log-probabilities of a shard's tokens under the policy, NaN for tokens that are not valid."""
    places = {place: row for row, place in enumerate(_places_of(samples))}
    values_T = np.full(len(samples.token_ids_T), np.nan, dtype=np.float32)
    for part in parts:
        rows = np.array([places[place] for place in _places_of(part.samples)], dtype=np.int64)
        values_T[samples.tokens_of(rows)] = step.unpad_logprobs(part.samples, None, part.scored)
    return values_T
