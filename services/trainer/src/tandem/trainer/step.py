"""One training step on any backend: fill the loss inputs, and optimize; or compute the loss alone.

It takes the table of a batch, the same on every rank, and the sequences that this rank trains on. It produces metrics
of the whole batch, the same on every rank. It waits only for the other ranks, inside the backend's collective
operations.

Loss inputs are columns, filled one source after another (`TrainingStep.filled`): by the models that score tokens, by
the algorithm's advantage estimator, and by the batch itself. If some models divide the batch differently from the
policy, here or in processes of their own, `tandem.trainer.exchange` brings sequences and columns from one to another.

Sequences whose log-probabilities differ too much between training and generation are left out.

Shapes: ``S`` sequences of a batch, ``T`` tokens of a rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.errors import NotFiniteError, OutlierError
from tandem.common.user_code import named
from tandem.config import Config
from tandem.config.schema.columns import ALWAYS_TIMED, SCORING_SECONDS, Model, Source
from tandem.samples.batch import MEDIA, Float32s, SampleBatch
from tandem.samples.batch_sharding import NO_RANK
from tandem.trainer.advantages import AdvantageEstimator, ScoredShard
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep, TrainerBackend
from tandem.trainer.batching.shard import RankBatch, unpad_into
from tandem.trainer.exchange import BatchExchange, RankExchange
from tandem.trainer.fetching import find_media_format
from tandem.trainer.losses import Loss, make_loss
from tandem.trainer.losses.custom import blamed
from tandem.trainer.micro_batches import Columns, MicroBatch
from tandem.trainer.rank_time import timed
from tandem.trainer.scorers.columns import Filled, filled_by, score_without_masks, scored_by
from tandem.trainer.scores import TokenScores
from tandem.trainer.set_aside import name_outlier, set_aside_by_loss

_LARGEST = 600.0
"""The largest difference of log-probabilities. Beyond it the error would not be finite, and exceeds any threshold."""


def leave_out(batch: RankBatch, threshold: float, policy_T: Float32s) -> None:
    """Mask the sequences on which training and generation differ by more than the threshold. Collective.

    `policy_T` are the log-probabilities of the shard's tokens under the policy.
    """
    shard, table = batch.shards["policy"], batch.table
    errors_S = torch.zeros(len(table), dtype=torch.float64)
    errors_S[torch.from_numpy(shard.rows)] = torch.from_numpy(mult_prob_errors(shard.samples, policy_T))
    errors = batch.backend.sum_over_ranks(errors_S).cpu().numpy()
    kept_S, metrics = select_sequences(errors, table.num_valid_S, table.rewards_S, threshold)
    batch.metrics |= metrics
    batch.keep(kept_S)


def mult_prob_errors(batch: SampleBatch, policy_T: Float32s) -> NDArray[np.float64]:
    """Return for each sequence the mean of exp |log p_training - log p_generation| over its valid tokens.

    A sequence without valid tokens has 0. Over all tokens of a batch, this is the metric ``token_mult_prob_error``.
    """
    valid_T = batch.valid()
    differences_T = np.abs(policy_T.astype(np.float64) - batch.generation_logprobs_T)
    errors_T = np.where(valid_T, np.exp(np.minimum(differences_T, _LARGEST)), 0.0)
    rows_T = np.repeat(np.arange(len(batch.lengths_S)), batch.lengths_S)
    sums_S = np.bincount(rows_T, weights=errors_T, minlength=len(batch.lengths_S))
    return np.asarray(sums_S / np.maximum(1, batch.num_valid()), dtype=np.float64)


def select_sequences(
    errors_S: NDArray[np.float64], num_valid_S: NDArray[np.int32], rewards_S: Float32s, threshold: float
) -> tuple[NDArray[np.bool_], dict[str, float]]:
    """Return a mask of the sequences to train on, and metrics under NeMo-RL's names.

    The largest error is over all sequences with a valid token. A reward of 1 is a correct answer.
    """
    kept_S = errors_S <= threshold
    masked_S = ~kept_S & (num_valid_S > 0)
    num_masked = int(masked_S.sum())
    return kept_S, {
        "max_seq_mult_prob_error": float(errors_S.max(initial=0.0)),
        "num_masked_seqs_by_logprob_error": float(num_masked),
        "masked_correct_pct": float((rewards_S[masked_S] == 1).sum() / max(1, num_masked)),
    }


LogprobsOfRows = tuple[tuple[int, ...], torch.Tensor]
"""The policy's log-probabilities of a micro-batch, padded and on their device, with its rows of the shard."""
NUMBERS = ("num_valid_tokens", "num_valid_samples")
"""Metrics that are not means."""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a training step."""

    metrics: dict[str, float]
    """Means over the valid tokens of each global batch, then over the optimizer steps; equal on every rank."""
    seconds: dict[str, float]
    """Seconds on this rank by phase: ``policy_training``, ``logprobs``, ``reference_logprobs``, and ``values``,
    ``value_training`` and ``teacher_logprobs`` with a value model or a teacher.
    """
    has_update: bool
    """Whether an optimizer step of the policy had a nonzero gradient and learning rate."""
    notes: tuple[str, ...] = ()
    """The rollout groups that were set aside, because optimizer steps would not have been finite with them."""
    logprobs: Callable[[], Float32s] | None = None
    """Computes the log-probabilities of the shard's tokens under the policy before this step, NaN for tokens that are
    not valid, from any thread. None unless they are to be kept.
    """


def train(
    backend: TrainerBackend,
    table: SampleBatch,
    samples: SampleBatch,
    config: Config,
    *,
    trained: Sequence[Model] | None = None,
    keeps_logprobs: bool = False,
    exchange: RankExchange | None = None,
) -> TrainResult:
    """Train on one batch: an optimizer step for each ``train_global_batch_size`` consecutive sequences (DPO: pairs).

    The previous policy of the loss's ratio is the one before the first of these steps. If there is only one step, that
    is the policy in training, and no separate pass computes its log-probabilities unless advantages need them. Another
    trained model takes its steps on the whole batch before the policy, as often as the algorithm passes over the batch.
    Schedules of learning rates advance once a pass, after its optimizer steps, as NeMo-RL's do.

    Args:
        backend: backend of this rank.
        table: table of the batch, the same on every rank.
        samples: sequences that the table assigns to this rank, in its order.
        config: configuration of the run.
        trained: the models to train, in that order; None for all that the algorithm trains.
        keeps_logprobs: whether to keep the policy's log-probabilities of the shard's tokens, from a pass of their own
            or else from the loss.
        exchange: the exchange with other trainers, if some models have processes of their own; None if all are here.

    Rollout groups with a loss or gradient that is not finite are set aside. Raises `TrainingError` if it still is not
    finite. That model's weights are then those of the optimizer step before.

    """
    step = TrainingStep(backend, table, samples, config, exchange)
    seconds = {"policy_training": 0.0, **dict.fromkeys(ALWAYS_TIMED, 0.0)}
    columns = step.filled(seconds)
    scored: list[LogprobsOfRows] | None = [] if keeps_logprobs and step.policy_logprobs_T is None else None
    parts: dict[Model, list[dict[str, float]]] = {}
    for _ in range(config.num_passes):
        for model in trained or config.declaration.trains:
            if model in step.shards:
                with timed(seconds, f"{model}_training"):
                    for rows in step.global_batches:
                        step_metrics = step.optimized(
                            rows, columns[model], model, scored if model == "policy" else None
                        )
                        parts.setdefault(model, []).append(step_metrics)
                    backend.advance_schedule(model)
    logprobs = None
    if keeps_logprobs and (step.policy_logprobs_T is not None or "policy" in parts):
        logprobs = partial(unpad_logprobs, samples, step.policy_logprobs_T, scored or ())
    metrics = _metrics_of_step(parts)
    if "policy" in step.shards:
        metrics |= step.numbers(step.global_batches) | step.metrics
    return TrainResult(
        metrics=metrics,
        seconds=seconds,
        has_update=any(part["grad_norm"] > 0 and part["learning_rate"] > 0 for part in parts.get("policy", ())),
        notes=tuple(step.notes),
        logprobs=logprobs,
    )


class TrainingStep(RankBatch):
    """The training on a batch of this rank: the filling of the loss inputs, and the optimizer steps."""

    def __init__(
        self,
        backend: TrainerBackend,
        table: SampleBatch,
        samples: SampleBatch,
        config: Config,
        exchange: RankExchange | None = None,
    ) -> None:
        """Take the table of a batch, and the sequences that it assigns to this rank. Collective."""
        self._exchange: BatchExchange | None = None
        samples_of_models = dict.fromkeys(config.holds, (table, samples))
        if exchange is not None or not backend.divides_alike:
            self._exchange = BatchExchange(exchange, backend, table, config)
            samples_of_models = self._exchange.divided(samples)
        media = find_media_format(config) if MEDIA[0] in samples.columns else None
        super().__init__(backend, config, table, samples_of_models, media)
        self.policy_logprobs_T: Float32s | None = None
        """Log-probabilities of the shard's tokens under the policy; None unless a separate pass has computed them."""
        self._whole_logprobs_T: Float32s | None = None
        """The same without sampling masks, where advantages compare them with another model's."""

    def filled(self, seconds: dict[str, float], size: int | None = None) -> dict[Model, Columns]:
        """Return the loss inputs of each trained model, for the tokens of its shard. Collective.

        Models score in micro-batches of `size`. The time of each is added to `seconds`; for a model with its own
        processes, the time of waiting for it.
        """
        columns: Filled = {}
        for model in self.config.scored_by(self.num_steps):
            if model in self.shards:
                with timed(seconds, SCORING_SECONDS[model]):
                    columns |= filled_by(self, model, size)
                    if model == "policy" and self.config.compares_whole_policy:
                        self._whole_logprobs_T = score_without_masks(self, size)
        if self._exchange is not None:
            columns = self._exchange.gathered(self, columns, seconds)
        if "policy" in self.shards:
            if self.config.largest_logprob_error is not None:
                leave_out(self, self.config.largest_logprob_error, _scores(columns)["policy"])
            columns |= self.finished(columns)
        if self._exchange is not None:
            return self._exchange.handed_out(self, columns, seconds)
        inputs: dict[Model, Columns] = {}
        for model in self.config.declaration.trains:
            inputs[model] = {column: columns[column] for column in self.config.columns_of(self.num_steps, model)}
        return inputs

    def finished(self, columns: Filled) -> Filled:
        """Return the columns made from models' scores, and those that came with the batch."""
        scores = _scores(columns) if columns else {}
        self.policy_logprobs_T = scores.get("policy")
        if self._whole_logprobs_T is not None:
            scores["policy"] = self._whole_logprobs_T
        path, new_columns, batch = self.config.advantage_estimator, Filled(), self.shard.samples
        if path:
            finish: AdvantageEstimator = named(path)
            new_columns, metrics = finish(
                self.config,
                ScoredShard(batch=batch, scores=scores, columns=columns, sum_over_ranks=self.backend.sum_over_ranks),
            )
            self.metrics |= metrics
        for column in self.read:
            if column not in columns and column not in new_columns:
                new_columns[column] = batch.of_tokens(column.name)
        return new_columns

    def optimized(
        self, rows: Sequence[int], columns: Columns, model: Model, scored: list[LogprobsOfRows] | None = None
    ) -> dict[str, float]:
        """Take one optimizer step of a model on a global batch; return its metrics, and add its scores to `scored`."""
        is_custom = model == "policy" and self.config.loss_fn.class_path is not None
        with blamed(self.config) if is_custom else nullcontext():
            try:
                loss, optimizer_step = self._step(rows, columns, model, scored, refuses_outliers=True)
            except NotFiniteError:
                if not set_aside_by_loss(self, rows, columns, model):
                    raise
                loss, optimizer_step = self._step(rows, columns, model, scored)
            except OutlierError as excess:
                name_outlier(self, rows, columns, model, str(excess))
                loss, optimizer_step = self._step(rows, columns, model, scored)
        return self.reported(loss, model) | {
            "loss": optimizer_step.loss,
            "grad_norm": optimizer_step.grad_norm,
            "learning_rate": optimizer_step.learning_rate,
        }

    def _step(
        self,
        rows: Sequence[int],
        columns: Columns,
        model: Model,
        scored: list[LogprobsOfRows] | None,
        *,
        refuses_outliers: bool = False,
    ) -> tuple[Loss, OptimizerStep]:
        loss = make_loss(self.config, self.counts(rows), self.backend.device, model)
        of_batch: LossOfMicroBatch = loss if scored is None else partial(keep_scores, scored, loss)
        micro_batches = self.micro_batches(rows, columns, model)
        return loss, self.backend.train_step(micro_batches, of_batch, model, refuses_outliers=refuses_outliers)

    def micro_batches(self, rows: Sequence[int], columns: Columns, model: Model = "policy") -> list[MicroBatch]:
        """Return this rank's micro-batches of a global batch for a model's training, with its loss inputs."""
        shard = self.shards[model]
        return shard.laid_out(shard.training(rows), self.backend.device, columns)

    def reported(self, loss: Loss, model: Model) -> dict[str, float]:
        """Return the means that a model's loss reports, over all ranks."""
        means = (self.shards[model].replicas.sum(loss.report.sums) / max(1, loss.report.count)).tolist()
        return dict(zip(loss.report.names, means, strict=True))


def _scores(columns: Columns) -> dict[Source, Float32s]:
    """Return the first number of each model's scores of the shard's tokens."""
    return {column.source: values_T for column, values_T in columns.items() if column.model and not column.number}


def _metrics_of_step(parts: Mapping[Model, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return the means over the optimizer steps of each model, and the learning rate of the last."""
    metrics: dict[str, float] = {}
    for model, step_metrics in parts.items():
        prefix = "" if model == "policy" else f"{model}/"
        for name in step_metrics[0]:
            metrics[f"{prefix}{name}"] = sum(map(itemgetter(name), step_metrics)) / len(step_metrics)
        metrics[f"{prefix}learning_rate"] = step_metrics[-1]["learning_rate"]
    return metrics


def keep_scores(scored: list[LogprobsOfRows], loss: Loss, batch: MicroBatch, scores_BT: TokenScores) -> torch.Tensor:
    """Return the loss of a micro-batch, and keep its log-probabilities on their device."""
    scored.append((batch.rows, scores_BT.logprobs.detach()))
    return loss(batch, scores_BT)


def unpad_logprobs(batch: SampleBatch, found_T: Float32s | None, scored: Sequence[LogprobsOfRows]) -> Float32s:
    """Return the log-probabilities of a shard's tokens, NaN for tokens that are not valid.

    A pass of their own has found them, or else the loss has scored them.
    """
    values_T = np.zeros(len(batch.token_ids_T), dtype=np.float32) if found_T is None else found_T
    for rows, logprobs_BT in scored:
        unpad_into(values_T, logprobs_BT, batch, rows)
    return np.where(batch.valid(), values_T, np.float32(np.nan))


def evaluate(
    backend: TrainerBackend,
    table: SampleBatch,
    samples: SampleBatch,
    config: Config,
    parts: Mapping[str, int] | None = None,
    exchange: RankExchange | None = None,
) -> dict[str, float]:
    """Return the loss of the whole batch, its reported means and the counts of the batch, without training.

    Nothing is returned on ranks without the policy.

    Args:
        backend: backend of this rank.
        table: table of the batch, the same on every rank.
        samples: sequences that the table assigns to this rank.
        config: configuration of the run.
        parts: sequences of each part of the batch, in order. Each has the same metrics as ``PART/METRIC``.
        exchange: as for `train`.

    """
    if not parts:
        return _evaluated(backend, table, samples, config, exchange)[0]
    rank = NO_RANK if exchange is not None and not exchange.model_group.has_policy else backend.data_parallel_rank
    evaluated_parts, first, first_own = {}, 0, 0
    for name, count in parts.items():
        part = table.take(slice(first, first + count))
        num_own = len(part.rows_of(rank))
        evaluated_parts[name] = _evaluated(
            backend, part, samples.take(slice(first_own, first_own + num_own)), config, exchange
        )
        first, first_own = first + count, first_own + num_own
    assert first == len(table), "the parts are the batch"
    num_valid = max(1, sum(counted for _, counted in evaluated_parts.values()))
    metrics = {
        name: sum(
            part[name] * (1 if name in NUMBERS else counted / num_valid) for part, counted in evaluated_parts.values()
        )
        for name in next(iter(evaluated_parts.values()))[0]
    }
    return metrics | {
        f"{part}/{name}": value
        for part, (part_metrics, _) in evaluated_parts.items()
        for name, value in part_metrics.items()
    }


def _evaluated(
    backend: TrainerBackend, table: SampleBatch, samples: SampleBatch, config: Config, exchange: RankExchange | None
) -> tuple[dict[str, float], int]:
    """Return the metrics of a batch and the divisor of its means; nothing on ranks without the policy."""
    step = TrainingStep(backend, table, samples, config, exchange)
    size = config.data_set_section.val_micro_batch_size
    columns = step.filled({}, size)
    if "policy" not in step.shards:
        return {}, 0
    counts = step.counts(range(len(table)))
    loss = make_loss(config, counts, backend.device)
    total = torch.zeros(1, dtype=torch.float64, device=backend.device)
    for micro_batch, scores_BT in scored_by(step, "policy", size, columns["policy"]):
        total += loss(micro_batch, scores_BT)
    metrics = step.reported(loss, "policy") | step.numbers([range(len(table))])
    metrics["loss"] = float(backend.sum_over_ranks(total)[0])
    return metrics, loss.report.count
