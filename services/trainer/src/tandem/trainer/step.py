"""One training step, as any backend runs it: fill the columns that losses read, and optimize.

Consumes the table of a batch, the same on every rank, and the sequences that this rank trains on; produces metrics of
the whole batch, the same on every rank. It waits for the other ranks, inside the backend's collective operations, and
for nothing else.

Columns are filled one source after another (`Step.fillers`): by the models that score tokens, here or in other
processes, by what the algorithm makes of their scores, and by the batch itself. What a model reads that divides the
ranks otherwise than the policy is brought to it by `tandem.trainer.exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.dotted import named
from tandem.common.errors import NotFiniteError
from tandem.config import Config
from tandem.config.schema.columns import ALWAYS_TIMED, SCORING_SECONDS, Column, Model, Source
from tandem.samples.assignment import NO_RANK, batches_of_samples
from tandem.samples.batch import Batch, Float32s
from tandem.samples.routed_experts import replayed_experts
from tandem.trainer.advantages import Finisher, Scored
from tandem.trainer.backend import Backend, LossOfMicroBatch, OptimizerStep
from tandem.trainer.exchange import BatchExchange, Exchange, divided_again, moved
from tandem.trainer.logprob_errors import kept_sequences, mult_prob_errors
from tandem.trainer.losses import Counts, Loss, make_loss
from tandem.trainer.losses.own import blamed
from tandem.trainer.micro_batches import Columns, MicroBatch, Shard, unpad_into
from tandem.trainer.scoring import Scores, TokenScores
from tandem.trainer.set_aside import BY_LOSS, not_finite, num_groups, of_groups, sample_named, set_aside_note

Filled = dict[Column, NDArray[Any]]
"""Columns of the tokens of a shard."""
NUMBERS = ("num_valid_tokens", "num_valid_samples")
"""Metrics that are no means."""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a training step did."""

    metrics: dict[str, float]
    """Means over the counted tokens of each global batch, then over the optimizer steps; equal on every rank."""
    seconds: dict[str, float]
    """Seconds on this rank by phase: ``policy_training``, ``logprobs``, ``reference_logprobs``, and of a value model
    ``values`` and ``value_training``, of a teacher ``teacher_logprobs``."""
    has_update: bool
    """Whether an optimizer step of the policy had a gradient and a learning rate that are not zero."""
    notes: tuple[str, ...] = ()
    """Which rollout groups were left out of optimizer steps that would not have been finite with them."""
    logprobs: Callable[[], Float32s] | None = None
    """Makes the log-probabilities of the shard's tokens under the policy as it met them, NaN where none counts; from
    any thread. None unless they were to be kept."""


def train(
    backend: Backend,
    whole: Batch,
    own: Batch,
    config: Config,
    *,
    trained: Sequence[Model] | None = None,
    keeps_logprobs: bool = False,
    exchange: Exchange | None = None,
) -> TrainResult:
    """Train on one batch: an optimizer step for each ``train_global_batch_size`` consecutive sequences (DPO: pairs).

    The previous policy of the loss's ratio is the one before the first of these steps. If there is only one, that is
    the policy in training, and no separate pass computes its log-probabilities unless advantages need them. A model
    that is trained beside the policy takes its steps on the whole batch before the policy takes its own, as often as
    the algorithm passes over the batch.

    Args:
        backend: of this rank.
        whole: table of the batch, the same on every rank.
        own: sequences that it assigns to this rank, in its order.
        config: of the run.
        trained: the models to train, in that order; None for all that the algorithm trains.
        keeps_logprobs: whether the policy's log-probabilities of the shard's tokens are kept: those of the pass that
            computes them, or where there is none, those that the loss has.
        exchange: with the other trainers, where some models have processes of their own; None: all are here.

    Rollout groups whose loss or gradient is no finite number are set aside. Raises `TrainingError` if it still is none;
    that model's weights are then those of the optimizer step before.

    """
    step = Step(backend, whole, own, config, exchange)
    seconds = {"policy_training": 0.0, **dict.fromkeys(ALWAYS_TIMED, 0.0)}
    columns = step.filled(seconds)
    kept = _KeptLogprobs(own, step.policy_logprobs_T)
    parts: dict[Model, list[dict[str, float]]] = {
        model: [] for model in trained or config.declaration.trains if step.holds(model)
    }
    for _ in range(config.num_passes):
        for model, found in parts.items():
            beside = kept.beside if keeps_logprobs and model == "policy" else _unchanged
            with timed(seconds, f"{model}_training"):
                found += [step.optimized(rows, columns, model, beside) for rows in step.global_batches]
    policy = parts.get("policy", [])
    return TrainResult(
        metrics=_metrics_of_step(parts) | (step.numbers() | step.metrics if step.holds("policy") else {}),
        seconds=seconds,
        has_update=any(part["grad_norm"] > 0 and part["learning_rate"] > 0 for part in policy),
        notes=tuple(step.notes),
        logprobs=kept.of_tokens if keeps_logprobs and kept.is_whole(bool(policy)) else None,
    )


def evaluate(
    backend: Backend,
    whole: Batch,
    own: Batch,
    config: Config,
    parts: Mapping[str, int] | None = None,
    exchange: Exchange | None = None,
) -> dict[str, float]:
    """Return the loss of the whole batch, what it reports, and how much there is of it; nothing is trained.

    Nothing is returned where the policy is not held.

    Args:
        backend: of this rank.
        whole: table of the batch, the same on every rank.
        own: sequences that it assigns to this rank.
        config: of the run.
        parts: sequences of each part of the batch, in order, of which the same is returned as ``PART/METRIC``.
        exchange: as for `train`.

    """
    if not parts:
        return _evaluated(backend, whole, own, config, exchange)[0]
    rank = NO_RANK if exchange is not None and not exchange.world.has_policy else backend.data_parallel_rank
    found, first, first_own = {}, 0, 0
    for name, count in parts.items():
        part = whole.take(slice(first, first + count))
        num_own = len(part.rows_of(rank))
        found[name] = _evaluated(backend, part, own.take(slice(first_own, first_own + num_own)), config, exchange)
        first, first_own = first + count, first_own + num_own
    assert first == len(whole), "the parts are the batch"
    num_counted = max(1, sum(counted for _, counted in found.values()))
    metrics = {
        name: sum(part[name] * (1 if name in NUMBERS else counted / num_counted) for part, counted in found.values())
        for name in next(iter(found.values()))[0]
    }
    return metrics | {f"{part}/{name}": value for part, (its, _) in found.items() for name, value in its.items()}


def _evaluated(
    backend: Backend, whole: Batch, own: Batch, config: Config, exchange: Exchange | None
) -> tuple[dict[str, float], int]:
    """Return the metrics of a batch, and what its means divide by; nothing where the policy is not held."""
    step = Step(backend, whole, own, config, exchange)
    size = config.data_set_section.val_micro_batch_size
    columns = step.filled({}, size)
    if not step.holds("policy"):
        return {}, 0
    counts = step.counts(range(len(whole)))
    loss = make_loss(config, counts, backend.device)
    total = torch.zeros(1, dtype=torch.float64, device=backend.device)
    for micro_batch, scores_BT in step.scored("policy", size, columns):
        total += loss(micro_batch, scores_BT)
    metrics = (
        step.reported(loss, "policy") | numbers_of(config, counts) | {"loss": float(backend.sum_over_ranks(total)[0])}
    )
    return metrics, loss.report.count


class Step:
    """One batch on this rank: the shard each model works on, the columns losses read, and the optimizer steps.

    Rows are those of the whole batch's table.
    """

    def __init__(
        self, backend: Backend, whole: Batch, own: Batch, config: Config, exchange: Exchange | None = None
    ) -> None:
        """Begin with the table of a batch, and the sequences that it assigns to this rank. Collective."""
        self.backend = backend
        self.config = config
        self._exchange = None if exchange is None else BatchExchange(exchange, whole, config)
        self.shards = _shards(backend, whole, own, config, self._exchange)
        """The shard of each model that this rank holds."""
        self._moved: dict[tuple[Model, Column], NDArray[Any]] = {}
        """Columns brought to models that divide the ranks otherwise than the policy."""
        self.policy_logprobs_T: Float32s | None = None
        """Log-probabilities of the shard's tokens under the policy; None unless a pass of its own has computed them."""
        self.metrics: dict[str, float] = {}
        """What the making of columns tells."""
        self.notes: list[str] = []
        """Which groups were set aside, and why."""
        self._whole = whole
        size = config.policy.train_global_batch_size * config.sequences_per_sample
        self.global_batches = batches_of_samples(whole.branch_S, size)
        self._num_steps = config.num_passes * len(self.global_batches)
        self._read = config.declaration.all_columns(config, self._num_steps)
        """The columns that losses of all models read in this step."""

    def holds(self, model: Model) -> bool:
        """Tell whether this rank has its part of a model."""
        return model in self.shards

    @property
    def _own(self) -> Shard:
        """The policy's shard on this rank, or where it does not hold the policy, that of its only model."""
        return next(iter(self.shards.values()))

    def counts(self, rows: Sequence[int]) -> Counts:
        """Return what the means over these sequences of all ranks divide by."""
        counted = self._whole.num_counted_S[list(rows)]
        positive = int(counted[self._whole.rewards_S[list(rows)] > 0].sum())
        return Counts(tokens=int(counted.sum()), sequences=int((counted > 0).sum()), positive_tokens=positive)

    def numbers(self) -> dict[str, float]:
        """Return how much there is of the whole batch."""
        parts = [numbers_of(self.config, self.counts(rows)) for rows in self.global_batches]
        return {name: sum(part[name] for part in parts) for name in NUMBERS}

    def filled(self, seconds: dict[str, float], size: int | None = None) -> Filled:
        """Return the columns that losses read, from all sources; models score in micro-batches of `size`. Collective.

        The time that models take is added to `seconds`: of one with processes of its own, that of waiting for it.
        """
        columns: Filled = {}
        for name, fill in self.fillers(size):
            with timed(seconds, name) if name else nullcontext():
                columns |= fill(columns)
        return columns

    def fillers(self, size: int | None = None) -> Iterator[tuple[str, Callable[[Filled], Filled]]]:
        """Go through what fills columns, in order: each is given those before it; what is timed has a name."""
        declared = self.config.declaration
        for model in filter(self.holds, declared.scored_by(self.config, self._num_steps)):
            yield SCORING_SECONDS[model], partial(self._scores_of, model, size)
        elsewhere = [] if self._exchange is None else [world.name for world in self._exchange.elsewhere]
        for model in elsewhere:
            said = [column for column in self._read if column.model == model]
            yield SCORING_SECONDS[model], partial(self._exchanged, model, "policy", said)
        if self.holds("policy"):
            if self.config.largest_logprob_error is not None:
                yield "", partial(self._leave_out, self.config.largest_logprob_error)
            yield "", self.finished
        for model in elsewhere:
            if model in declared.trains:
                assert self.config.largest_logprob_error is None, "who leaves sequences out trains the policy alone"
                yield (
                    "",
                    partial(self._exchanged, "policy", model, declared.columns_of(self.config, self._num_steps, model)),
                )

    def finished(self, columns: Filled) -> Filled:
        """Return the columns that are made of models' scores, and those that came with the batch."""
        scores = _scores(columns)
        self.policy_logprobs_T = scores.get("policy")
        path, made, batch = self.config.declaration.finisher(self.config), Filled(), self._own.own
        if path:
            finish: Finisher = named(path)
            made, metrics = finish(
                self.config, Scored(batch=batch, scores=scores, sum_over_ranks=self.backend.sum_over_ranks)
            )
            self.metrics |= metrics
        given = [column for column in self._read if column not in columns and column not in made]
        return made | {column: batch.of_tokens(column.name) for column in given}

    def _scores_of(self, model: Model, size: int | None, columns: Filled) -> Filled:
        """Return the columns of what a model says of the shard's counted tokens; zeros elsewhere."""
        shard = self.shards[model]
        found = {column: self._nothing(column, shard) for column in self._read if column.model == model}
        for number in range(self.config.num_of(model)):
            for micro_batch, scores_BT in self.scored(model, size, number=number):
                for column, values_T in found.items():
                    unpad_into(values_T, scores_BT[column.number], shard.own, micro_batch.rows)
        if shard.replicas.sizes == self._own.replicas.sizes:
            return found
        return {column: moved(values_T, shard, self._own) for column, values_T in found.items()}

    def _exchanged(self, source: Model, target: Model, which: Sequence[Column], columns: Filled) -> Filled:
        """Bring columns from one model's processes to another's."""
        assert self._exchange is not None, "asked only where models have processes of their own"
        return self._exchange.columns(source, target, which, columns, self._own)

    def _leave_out(self, threshold: float, columns: Filled) -> Filled:
        """Have no token count of sequences about which training and generation disagree by more. Collective."""
        errors_S = torch.zeros(len(self._whole), dtype=torch.float64)
        own = self.shards["policy"]
        errors_S[torch.from_numpy(own.rows)] = torch.from_numpy(mult_prob_errors(own.own, _scores(columns)["policy"]))
        errors = self.backend.sum_over_ranks(errors_S).cpu().numpy()
        counted_S, rewards_S = self._whole.num_counted_S, self._whole.rewards_S
        kept_S, metrics = kept_sequences(errors, counted_S, rewards_S, threshold)
        self.metrics |= metrics
        self._keep(kept_S)
        return {}

    def _keep(self, kept_S: NDArray[np.bool_]) -> None:
        """Have no token count of the batch's other sequences."""
        counted_S = self._whole.num_counted_S
        self._whole = self._whole.replace(num_counted_S=np.where(kept_S, counted_S, 0).astype(counted_S.dtype))
        for shard in self.shards.values():
            shard.own = shard.own.keeping(kept_S[shard.rows])

    def _nothing(self, column: Column, shard: Shard) -> NDArray[Any]:
        rows = () if column.num_each is None else (column.num_each(self.config),)
        return np.zeros((len(shard.own.token_ids_T), *rows), dtype=column.dtype)

    def scored(
        self, model: Model, size: int | None = None, columns: Columns | None = None, number: int = 0
    ) -> list[tuple[MicroBatch, Scores]]:
        """Return all micro-batches of this rank, each with what a model says of it.

        Where there are several models of the name, `number` is which of them, and the batch says which sequences are
        for it.
        """
        batches: Sequence[Sequence[int]] = self.global_batches
        if self.config.num_of(model) > 1:
            is_its_S = self._whole.columns[f"{model}_S"] == number
            batches = [[row for row in rows if is_its_S[row]] for rows in batches]
        if not any(batches):
            return []
        shard = self.shards[model]
        micro_batches = shard.laid_out(shard.scoring(batches, size), self.backend.device, columns)
        return list(zip(micro_batches, self.backend.scores(micro_batches, model, number), strict=True))

    def optimized(
        self, rows: Sequence[int], columns: Columns, model: Model, beside: Callable[[Loss], LossOfMicroBatch]
    ) -> dict[str, float]:
        """Take one optimizer step of a model on a global batch; return its metrics."""
        is_custom = model == "policy" and self.config.loss_fn.class_path is not None
        with blamed(self.config) if is_custom else nullcontext():
            try:
                loss, done = self._step(rows, columns, model, beside)
            except NotFiniteError:
                if not self._set_aside(rows, columns, model):
                    raise
                loss, done = self._step(rows, columns, model, beside)
        return self.reported(loss, model) | {
            "loss": done.loss,
            "grad_norm": done.grad_norm,
            "learning_rate": done.learning_rate,
        }

    def _step(
        self, rows: Sequence[int], columns: Columns, model: Model, beside: Callable[[Loss], LossOfMicroBatch]
    ) -> tuple[Loss, OptimizerStep]:
        loss = make_loss(self.config, self.counts(rows), self.backend.device, model)
        return loss, self.backend.train_step(self.micro_batches(rows, columns, model), beside(loss), model)

    def micro_batches(self, rows: Sequence[int], columns: Columns, model: Model = "policy") -> list[MicroBatch]:
        """Return this rank's micro-batches of a global batch that a model is trained on, with what its loss reads."""
        shard = self.shards[model]
        return shard.laid_out(shard.training(rows), self.backend.device, self._read_by(model, columns))

    def reported(self, loss: Loss, model: Model) -> dict[str, float]:
        """Return the means that a model's loss reports, over all ranks."""
        means = (self.shards[model].replicas.sum(loss.report.sums) / max(1, loss.report.count)).tolist()
        return dict(zip(loss.report.names, means, strict=True))

    def _read_by(self, model: Model, columns: Columns) -> Columns:
        """Return what a model's loss reads of each token of its own shard."""
        declared = self.config.declaration
        read = {each: declared.columns_of(self.config, self._num_steps, each) for each in declared.trains}
        others = {column for found in read.values() for column in found} - set(read[model])
        own = {column: values_T for column, values_T in columns.items() if column not in others}
        shard = self.shards[model]
        if shard.replicas.sizes == self._own.replicas.sizes:
            return own
        for column, values_T in own.items():
            if (model, column) not in self._moved:
                self._moved[model, column] = moved(values_T, self._own, shard)
        return {column: self._moved[model, column] for column in own}

    def _set_aside(self, rows: Sequence[int], columns: Columns, model: Model) -> bool:
        """Have no group of these sequences count whose part of a model's loss is not finite; tell whether others do.

        Nothing changes where there are no groups, none is found, or no other is left: then it is no sample's doing.
        Collective.
        """
        if not self.config.declaration.rolls_out:
            return False
        loss = make_loss(self.config, self.counts(rows), self.backend.device, model)
        found_S = torch.zeros(len(self._whole), dtype=torch.float64)
        shard = self.shards[model]
        for micro_batch, scores in self.scored(model, columns=self._read_by(model, columns)):
            for place in not_finite(loss, micro_batch, scores):
                found_S[shard.rows[place]] = 1
        wild_S = shard.replicas.sum(found_S).cpu().numpy() > 0
        in_step_S = np.isin(np.arange(len(wild_S)), list(rows)) & (self._whole.num_counted_S > 0)
        kept_S = ~of_groups(wild_S & in_step_S, self._whole)
        if kept_S.all() or not (kept_S & in_step_S).any():
            return False
        first = sample_named(self._whole, int((wild_S & in_step_S).argmax()))
        aside = set_aside_note(kept_S, self._whole)
        self.notes.append(f"{first} has a loss or gradient that is no finite number: {aside}")
        self.metrics[BY_LOSS] = self.metrics.get(BY_LOSS, 0.0) + num_groups(kept_S, self._whole)
        self._keep(kept_S)
        return True


def _shards(
    backend: Backend, whole: Batch, own: Batch, config: Config, exchange: BatchExchange | None
) -> dict[Model, Shard]:
    """Return the shard that each model held here works on, the policy's first. Collective.

    It is what the table assigns to this rank, or what another division of the ranks makes of it.
    """
    models = config.declaration.holds(config) if exchange is None else exchange.world.models
    first = backend.replicas(models[0])
    here = None if exchange is None else exchange.shard(backend, own)
    by_sizes = {first.sizes: (whole, own) if here is None else here}
    shards: dict[Model, Shard] = {}
    for model in models:
        replicas, settings = backend.replicas(model), config.settings_of(model)
        if replicas.sizes not in by_sizes:
            by_sizes[replicas.sizes] = divided_again(shards[models[0]], model, replicas, config)
        shards[model] = Shard(
            settings,
            *by_sizes[replicas.sizes],
            replicas,
            shares_prompts=settings.share_prompts and backend.shares_prompts,
            unit=config.sequences_per_sample,
            experts=replayed_experts(config, model),
        )
    return shards


def _scores(columns: Columns) -> dict[Source, Float32s]:
    """Return the first number that each model says of the shard's tokens."""
    return {column.source: values_T for column, values_T in columns.items() if column.model and not column.number}


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


class _KeptLogprobs:
    """Log-probabilities of a shard's tokens under the policy, kept on its device until they are asked for."""

    def __init__(self, batch: Batch, policy_T: Float32s | None) -> None:
        """`policy_T` is what a pass of its own has computed, None if there was none."""
        self._batch = batch
        self._policy_T = policy_T
        self._scored: list[tuple[tuple[int, ...], torch.Tensor]] = []
        """Rows of the shard, and the log-probabilities of their padded tokens."""

    def beside(self, loss: Loss) -> LossOfMicroBatch:
        """Return the loss as one that keeps the log-probabilities it is computed from, if there are none yet."""
        return loss if self._policy_T is not None else partial(self._keep, loss)

    def is_whole(self, is_trained: bool) -> bool:
        """Tell whether they are known of all of the batch, once the policy has trained on it or was left out."""
        return is_trained or self._policy_T is not None

    def of_tokens(self) -> Float32s:
        """Return the log-probabilities of the shard's tokens, NaN for those that do not count."""
        values_T = self._policy_T
        if values_T is None:
            values_T = np.zeros(len(self._batch.token_ids_T), dtype=np.float32)
            for rows, logprobs_BT in self._scored:
                unpad_into(values_T, logprobs_BT, self._batch, rows)
        return np.where(self._batch.counted(), values_T, np.float32(np.nan))

    def _keep(self, loss: Loss, micro_batch: MicroBatch, scores_BT: TokenScores) -> torch.Tensor:
        self._scored.append((micro_batch.rows, scores_BT.logprobs.detach()))
        return loss(micro_batch, scores_BT)


def _unchanged(loss: Loss) -> LossOfMicroBatch:
    return loss


def _metrics_of_step(parts: Mapping[Model, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return the means over the optimizer steps of each model, and the learning rate of the last."""
    metrics: dict[str, float] = {}
    for model, found in parts.items():
        prefix = "" if model == "policy" else f"{model}/"
        metrics |= {f"{prefix}{name}": sum(part[name] for part in found) / len(found) for name in found[0]}
        metrics[f"{prefix}learning_rate"] = found[-1]["learning_rate"]
    return metrics
