"""The loss of a batch on any backend, without training: what SFT, DPO and reward models validate by."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import NO_RANK
from tandem.trainer.backend import TrainerBackend
from tandem.trainer.exchange import RankExchange
from tandem.trainer.losses import make_loss
from tandem.trainer.scorers.columns import scored_by
from tandem.trainer.step import NUMBERS, TrainingStep


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
