"""One training step, as any backend runs it: score the share where the loss needs it, and optimize.

Consumes the table of a batch, the same on every rank, and the rank's own share of its tokens; produces metrics of the
whole batch, the same on every rank. It waits for the other ranks, inside the backend's collective operations, and for
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import msgspec
import numpy as np
import torch

from tandem.common.assignment import NO_RANK
from tandem.common.batch import Batch, Float32s
from tandem.common.columns import Model
from tandem.common.config import Config
from tandem.common.errors import NotFiniteError
from tandem.trainer import packing
from tandem.trainer.backend import Backend, LossOfMicroBatch, OptimizerStep
from tandem.trainer.exchange import Exchange
from tandem.trainer.losses import Loss, make_loss
from tandem.trainer.losses.own import blamed
from tandem.trainer.packing import Columns, MicroBatch
from tandem.trainer.scoring import TokenScores
from tandem.trainer.share import NUMBERS, Share, numbers_of, timed


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
    """Makes the log-probabilities of the share's tokens under the policy as it met them, NaN where none counts; from
    any thread. None unless they were to be kept."""


def train(
    backend: Backend,
    table: Batch,
    share: Batch,
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
        table: of the batch, the same on every rank.
        share: what `table` assigns to this rank, in its order.
        config: of the run.
        trained: the models to train, in that order; None for all that the algorithm trains.
        keeps_logprobs: whether the policy's log-probabilities of the share's tokens are kept: those of the pass that
            computes them, or where there is none, those that the loss has.
        exchange: with the other trainers, where some models have processes of their own; None: all are here.

    Rollout groups whose loss or gradient is no finite number are set aside. Raises `TrainingError` if it still is none;
    that model's weights are then those of the optimizer step before.

    """
    shares = Share(backend, table, share, config, exchange)
    seconds = {"policy_training": 0.0, "logprobs": 0.0, "reference_logprobs": 0.0}
    columns = shares.columns(seconds)
    kept = _KeptLogprobs(share, shares.policy_logprobs_T)
    parts: dict[Model, list[dict[str, float]]] = {
        model: [] for model in trained or config.declaration.trains if shares.holds(model)
    }
    for _ in range(config.num_passes):
        for model, found in parts.items():
            beside = kept.beside if keeps_logprobs and model == "policy" else _unchanged
            with timed(seconds, f"{model}_training"):
                found += [_optimized(shares, rows, columns, model, beside) for rows in shares.global_batches]
    policy = parts.get("policy", [])
    return TrainResult(
        metrics=_metrics_of_step(parts) | (shares.numbers() | shares.metrics if shares.holds("policy") else {}),
        seconds=seconds,
        has_update=any(part["grad_norm"] > 0 and part["learning_rate"] > 0 for part in policy),
        notes=tuple(shares.notes),
        logprobs=kept.of_tokens if keeps_logprobs and kept.is_whole(bool(policy)) else None,
    )


def evaluate(
    backend: Backend,
    table: Batch,
    share: Batch,
    config: Config,
    parts: Mapping[str, int] | None = None,
    exchange: Exchange | None = None,
) -> dict[str, float]:
    """Return the loss of the whole batch, what it reports, and how much there is of it; nothing is trained.

    Nothing is returned where the policy is not held.

    Args:
        backend: of this rank.
        table: of the batch, the same on every rank.
        share: what it assigns to this rank.
        config: of the run.
        parts: sequences of each part of the batch, in order, of which the same is returned as ``PART/METRIC``.
        exchange: as for `train`.

    """
    if not parts:
        return _evaluated(backend, table, share, config, exchange)[0]
    rank = NO_RANK if exchange is not None and not exchange.world.has_policy else backend.data_parallel_rank
    found, first, first_own = {}, 0, 0
    for name, count in parts.items():
        part = table.take(slice(first, first + count))
        num_own = len(part.rows_of(rank))
        found[name] = _evaluated(backend, part, share.take(slice(first_own, first_own + num_own)), config, exchange)
        first, first_own = first + count, first_own + num_own
    assert first == len(table), "the parts are the batch"
    num_counted = max(1, sum(counted for _, counted in found.values()))
    metrics = {
        name: sum(part[name] * (1 if name in NUMBERS else counted / num_counted) for part, counted in found.values())
        for name in next(iter(found.values()))[0]
    }
    return metrics | {f"{part}/{name}": value for part, (own, _) in found.items() for name, value in own.items()}


def _evaluated(
    backend: Backend, table: Batch, share: Batch, config: Config, exchange: Exchange | None
) -> tuple[dict[str, float], int]:
    """Return the metrics of a batch, and what its means divide by; nothing where the policy is not held."""
    shares = Share(backend, table, share, config, exchange)
    size = config.data_set_section.val_micro_batch_size
    columns = shares.columns({}, size)
    if not shares.holds("policy"):
        return {}, 0
    counts = shares.counts(range(len(table)))
    loss = make_loss(config, counts, backend.device)
    total = torch.zeros(1, dtype=torch.float64, device=backend.device)
    for micro_batch, scores_BT in shares.scored("policy", size, columns):
        total += loss(micro_batch, scores_BT)
    metrics = (
        shares.reported(loss, "policy") | numbers_of(config, counts) | {"loss": float(backend.sum_over_ranks(total)[0])}
    )
    return metrics, loss.report.count


class _KeptLogprobs:
    """What the policy says of a share's tokens, kept on its device until somebody asks."""

    def __init__(self, batch: Batch, policy_T: Float32s | None) -> None:
        """`policy_T` is what a pass of its own has computed, None if there was none."""
        self._batch = batch
        self._policy_T = policy_T
        self._scored: list[tuple[tuple[int, ...], torch.Tensor]] = []
        """Rows of the share, and the log-probabilities of their padded tokens."""

    def beside(self, loss: Loss) -> LossOfMicroBatch:
        """Return the loss as one that keeps the log-probabilities it is computed from, if there are none yet."""
        return loss if self._policy_T is not None else partial(self._keep, loss)

    def is_whole(self, is_trained: bool) -> bool:
        """Tell whether they are known of all of the batch, once the policy has trained on it or was left out."""
        return is_trained or self._policy_T is not None

    def of_tokens(self) -> Float32s:
        """Return the log-probabilities of the share's tokens, NaN for those that do not count."""
        values_T = self._policy_T
        if values_T is None:
            values_T = np.zeros(len(self._batch.token_ids_T), dtype=np.float32)
            for rows, logprobs_BT in self._scored:
                packing.unpad_into(values_T, logprobs_BT, self._batch, rows)
        return np.where(self._batch.counted(), values_T, np.float32(np.nan))

    def _keep(self, loss: Loss, micro_batch: MicroBatch, scores_BT: TokenScores) -> torch.Tensor:
        self._scored.append((micro_batch.rows, scores_BT.logprobs.detach()))
        return loss(micro_batch, scores_BT)


def _unchanged(loss: Loss) -> LossOfMicroBatch:
    return loss


def _optimized(
    shares: Share, rows: Sequence[int], columns: Columns, model: Model, beside: Callable[[Loss], LossOfMicroBatch]
) -> dict[str, float]:
    """Take one optimizer step of a model on a global batch; return its metrics."""
    backend, config = shares.backend, shares.config

    def step() -> tuple[Loss, OptimizerStep]:
        loss = make_loss(config, shares.counts(rows), backend.device, model)
        return loss, backend.train_step(shares.micro_batches(rows, columns, model), beside(loss), model)

    with blamed(config) if model == "policy" else nullcontext():
        try:
            loss, done = step()
        except NotFiniteError:
            if not shares.set_aside(
                make_loss(config, shares.counts(rows), backend.device, model), rows, columns, model
            ):
                raise
            loss, done = step()
    return shares.reported(loss, model) | {
        "loss": done.loss,
        "grad_norm": done.grad_norm,
        "learning_rate": done.learning_rate,
    }


def _metrics_of_step(parts: Mapping[Model, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return the means over the optimizer steps of each model, and the learning rate of the last."""
    metrics: dict[str, float] = {}
    for model, found in parts.items():
        prefix = "" if model == "policy" else f"{model}/"
        metrics |= {f"{prefix}{name}": sum(part[name] for part in found) / len(found) for name in found[0]}
        metrics[f"{prefix}learning_rate"] = found[-1]["learning_rate"]
    return metrics
