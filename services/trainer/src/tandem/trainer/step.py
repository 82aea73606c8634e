"""One training step, as any backend runs it: shard the batch, score it where the loss needs that, and optimize.

Consumes a whole ragged batch, the same on every rank; produces metrics of the whole batch, the same on every rank. It
waits for the other ranks, inside the backend's collective operations, and for nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import torch

from tandem.common.batch import Float32s, TrainingBatch
from tandem.common.config import Config
from tandem.trainer import packing
from tandem.trainer.advantages import minus_kl, whitened
from tandem.trainer.backend import Backend, OptimizerStep, WhichModel
from tandem.trainer.batching import Batching
from tandem.trainer.losses import Counts, Loss, make_loss
from tandem.trainer.losses.own import blamed
from tandem.trainer.packing import MicroBatch
from tandem.trainer.scoring import TokenScores
from tandem.trainer.sharing import find_prompts

_NUMBERS = ("num_valid_tokens", "num_valid_samples")
"""Metrics that are no means."""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a training step did."""

    metrics: dict[str, float]
    """Means over the counted tokens of each global batch, then over the optimizer steps; equal on every rank."""
    seconds: dict[str, float]
    """Seconds on this rank by phase: ``policy_training``, ``logprobs``, ``reference_logprobs``."""
    has_update: bool
    """Whether an optimizer step had a gradient and a learning rate that are not zero."""


def train(backend: Backend, batch: TrainingBatch, config: Config) -> TrainResult:
    """Train on one batch: an optimizer step for each ``train_global_batch_size`` consecutive sequences (DPO: pairs).

    The previous policy of the loss's ratio is the one before the first of these steps. If there is only one, that is
    the policy in training, and no separate pass computes its log-probabilities unless advantages need them.
    Raises `TrainingError` if a loss or gradient is no finite number; the weights are then those of the step before.
    """
    shares = _Shares(backend, batch, config)
    seconds = {"policy_training": 0.0, "logprobs": 0.0, "reference_logprobs": 0.0}
    previous_T = reference_T = None
    if config.needs_reference:
        with _timed(seconds, "reference_logprobs"):
            reference_T = shares.logprobs("reference")
    if "policy" in config.declaration.scored_by(config, len(shares.global_batches)):
        with _timed(seconds, "logprobs"):
            previous_T = shares.logprobs("policy")
    tokens = _Tokens(
        advantages=shares.advantages(config, previous_T, reference_T), previous=previous_T, reference=reference_T
    )
    parts = []
    with _timed(seconds, "policy_training"):
        for rows in shares.global_batches:
            loss = make_loss(config, shares.counts(rows), backend.device)
            with blamed(config):
                done = backend.train_step(shares.micro_batches(rows, tokens), loss)
            parts.append(_metrics(backend, config, loss, shares.counts(rows), done))
    metrics = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    # A batch has so many of these in all, and ends on this learning rate.
    metrics |= {name: sum(part[name] for part in parts) for name in _NUMBERS}
    metrics["learning_rate"] = parts[-1]["learning_rate"]
    has_update = any(part["grad_norm"] > 0 and part["learning_rate"] > 0 for part in parts)
    return TrainResult(metrics=metrics, seconds=seconds, has_update=has_update)


def evaluate(
    backend: Backend, batch: TrainingBatch, config: Config, parts: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Return the loss of the whole batch, what it reports, and how much there is of it; nothing is trained.

    Args:
        backend: of this rank.
        batch: the same on every rank.
        config: of the run.
        parts: sequences of each part of the batch, in order, of which the same is returned as ``PART/METRIC``.

    """
    if not parts:
        return _evaluated(backend, batch, config)[0]
    found, first = {}, 0
    for name, count in parts.items():
        found[name] = _evaluated(backend, batch.part(first, count), config)
        first += count
    assert first == len(batch.lengths_S), "the parts are the batch"
    num_counted = max(1, sum(counted for _, counted in found.values()))
    metrics = {
        name: sum(part[name] * (1 if name in _NUMBERS else counted / num_counted) for part, counted in found.values())
        for name in next(iter(found.values()))[0]
    }
    return metrics | {f"{part}/{name}": value for part, (own, _) in found.items() for name, value in own.items()}


def _evaluated(backend: Backend, batch: TrainingBatch, config: Config) -> tuple[dict[str, float], int]:
    """Return the metrics of a batch, and what its means divide by."""
    shares = _Shares(backend, batch, config)
    counts = shares.counts(range(len(batch.lengths_S)))
    loss = make_loss(config, counts, backend.device)
    size = config.data_set_section.val_micro_batch_size
    reference_T = shares.logprobs("reference", size) if config.needs_reference else None
    tokens = _Tokens(advantages=shares.advantages(config, None, None), previous=None, reference=reference_T)
    total = torch.zeros(1, dtype=torch.float64, device=backend.device)
    for micro_batch, scores_BT in shares.scored("policy", size, tokens):
        total += loss(micro_batch, scores_BT)
    metrics = _reported(backend, config, loss, counts) | {"loss": float(backend.sum_over_ranks(total)[0])}
    return metrics, loss.report.count


class _Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss reads of each token of the batch, ``[T]``, where this rank has its sequence."""

    advantages: Float32s
    previous: Float32s | None
    reference: Float32s | None


class _Shares:
    """This rank's shares of a batch."""

    def __init__(self, backend: Backend, batch: TrainingBatch, config: Config) -> None:
        self._backend = backend
        self._batch = batch
        policy = config.policy
        cuts_by_tokens = policy.sequence_packing.enabled or policy.dynamic_batching.enabled
        shares = policy.share_prompts and backend.shares_prompts and not cuts_by_tokens
        self._prompts = find_prompts(batch) if shares else None
        self._batching = Batching(
            policy,
            batch.lengths_S,
            rank=backend.data_parallel_rank,
            num_ranks=backend.data_parallel_size,
            sequence_divisor=backend.sequence_divisor,
            prompts=self._prompts,
            unit=config.sequences_per_sample,
        )
        self._counted_S = packing.counts_of_sequences(batch)
        size = policy.train_global_batch_size * config.sequences_per_sample
        self.global_batches = packing.global_batches(len(batch.lengths_S), size)

    def counts(self, rows: Sequence[int]) -> Counts:
        """Return what the means over these sequences divide by."""
        counted = self._counted_S[list(rows)]
        rewards_S = self._batch.rewards_S
        positive = int(counted[rewards_S[list(rows)] > 0].sum()) if len(rewards_S) else 0
        return Counts(tokens=int(counted.sum()), sequences=int((counted > 0).sum()), positive_tokens=positive)

    def micro_batches(self, rows: Sequence[int], tokens: _Tokens) -> list[MicroBatch]:
        """Return this rank's training micro-batches of a global batch."""
        return [self._pad(group, tokens) for group in self._batching.training(rows)]

    def advantages(self, config: Config, previous_T: Float32s | None, reference_T: Float32s | None) -> Float32s:
        """Return the advantage of each token, right for this rank's."""
        advantages_T = np.repeat(self._batch.advantages_S, self._batch.lengths_S)
        if not config.declaration.finishes_advantages(config):
            return advantages_T
        if config.loss_fn.use_kl_in_reward:
            assert previous_T is not None
            assert reference_T is not None
            advantages_T = minus_kl(advantages_T, previous_T, reference_T, config.loss_fn)
        is_mine_S = np.zeros(len(self._batch.lengths_S), dtype=np.bool_)
        mine = [row for group in self._batching.scoring(self.global_batches) for row in group]
        is_mine_S[[row for row in mine if row != packing.EMPTY_ROW]] = True
        own_T = np.repeat(is_mine_S, self._batch.lengths_S) & packing.counted_tokens(self._batch)
        return whitened(advantages_T, own_T, self._backend.sum_over_ranks)

    def logprobs(self, model: WhichModel, size: int | None = None) -> Float32s:
        """Return the log-probabilities of this rank's counted tokens where they lie in the batch, zeros elsewhere."""
        values_T = np.zeros(len(self._batch.token_ids_T), dtype=np.float32)
        for micro_batch, scores_BT in self.scored(model, size):
            packing.unpad_into(values_T, scores_BT.logprobs, self._batch, micro_batch.rows)
        return values_T

    def scored(
        self, model: WhichModel, size: int | None = None, tokens: _Tokens | None = None
    ) -> list[tuple[MicroBatch, TokenScores]]:
        """Return all micro-batches of this rank, each with its scores."""
        padded = [self._pad(group, tokens) for group in self._batching.scoring(self.global_batches, size)]
        return list(zip(padded, self._backend.scores(padded, model), strict=True))

    def _pad(self, group: Sequence[int], tokens: _Tokens | None = None) -> MicroBatch:
        return packing.pad(
            self._batch,
            group,
            divisible_by=self._batching.divisible_by,
            row_divisible_by=self._batching.row_divisible_by,
            device=self._backend.device,
            prompts=self._prompts,
            advantages_T=tokens.advantages if tokens else None,
            previous_logprobs_T=tokens.previous if tokens else None,
            reference_logprobs_T=tokens.reference if tokens else None,
        )


def _metrics(backend: Backend, config: Config, loss: Loss, counts: Counts, done: OptimizerStep) -> dict[str, float]:
    return _reported(backend, config, loss, counts) | {
        "loss": done.loss,
        "grad_norm": done.grad_norm,
        "learning_rate": done.learning_rate,
    }


def _reported(backend: Backend, config: Config, loss: Loss, counts: Counts) -> dict[str, float]:
    means = (backend.sum_over_ranks(loss.report.sums) / max(1, loss.report.count)).tolist()
    return dict(zip(loss.report.names, means, strict=True)) | {
        "num_valid_tokens": float(counts.tokens),
        "num_valid_samples": float(counts.sequences // config.sequences_per_sample),
    }


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - started
