"""Setting aside of rollout groups with numbers that no loss can compute with: no token of them counts.

The numbers come from an engine, from a rollout log, or from the loss itself. A group is set aside as a whole, because
its samples are compared with each other. The other groups are trained on as if it had not been there.

Shapes: ``S`` sequences of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.numeric import LEAST_LOGPROB, find_outliers
from tandem.common.user_code import line
from tandem.config.schema.columns import Model
from tandem.samples.batch import Float32s, SampleBatch
from tandem.samples.batch_sharding import EMPTY_ROW
from tandem.trainer.batching.shard import RankBatch
from tandem.trainer.losses import Loss, make_loss
from tandem.trainer.micro_batches import Columns, MicroBatch
from tandem.trainer.scorers.columns import scored_by
from tandem.trainer.scores import Scores

BY_LOGPROBS, BY_LOSS = "groups_set_aside/logprobs", "groups_set_aside/loss"
OUTLIERS = "groups_set_aside/outliers"
"""Metrics that count the groups."""
Sum = Callable[[torch.Tensor], torch.Tensor]
"""Adds a tensor over all trainers."""


def least_logprobs(samples: SampleBatch) -> Float32s:
    """Return an engine's least log-probability in each sequence, or zero if none is below the bound."""
    low_T = np.where(samples.generation_logprobs_T < LEAST_LOGPROB, samples.generation_logprobs_T, np.float32(0))
    if not len(low_T):
        return low_T
    starts_S = np.cumsum(samples.lengths_S, dtype=np.int64) - samples.lengths_S
    return np.asarray(np.minimum.reduceat(low_T, starts_S), dtype=np.float32)


class TrainingShard(NamedTuple):
    """A batch to train on, and this rank's part of it, without the groups that were set aside."""

    table: SampleBatch
    """Table of the whole batch, the same on every rank."""
    samples: SampleBatch
    """Sequences that the table assigns to this rank, with their tokens."""
    num_aside: int = 0
    """Groups that were set aside."""
    notes: tuple[str, ...] = ()
    """One line about them, which names the first of the samples; nothing if there are none."""


def set_aside(
    table: SampleBatch,
    samples: SampleBatch,
    rows: NDArray[np.int64],
    least_S: Float32s,
    add: Sum,
) -> TrainingShard:
    """Set aside the groups with a log-probability of an engine beyond the bound. Collective.

    Args:
        table: table of the whole batch.
        samples: sequences of this rank.
        rows: places of these sequences in the table.
        least_S: least log-probability of each of these sequences, see `least_logprobs`.
        add: adds a tensor over all trainers. Several of them may have the same sequences.

    """
    wild_S2 = torch.zeros((len(table), 2), dtype=torch.float64)
    wild_S2[torch.from_numpy(rows), 0] = torch.from_numpy((least_S < 0).astype(np.float64))
    wild_S2[torch.from_numpy(rows), 1] = torch.from_numpy(least_S.astype(np.float64))
    sums = add(wild_S2).numpy()
    wild_S = sums[:, 0] > 0
    kept_S = ~of_groups(wild_S, table)
    first = int(wild_S.argmax())
    least = sums[first, 1] / sums[first, 0]
    note = (
        f"{sample_named(table, first, table.sources)} has a log-probability of {least:g} for a token that was drawn, "
        f"below {LEAST_LOGPROB:g}, which is as far as float32 carries: {set_aside_note(kept_S, table)}"
    )
    return TrainingShard(
        table=table.replace(num_valid_S=np.where(kept_S, table.num_valid_S, 0).astype(np.int32)),
        samples=samples.keep_sequences(kept_S[rows]),
        num_aside=num_groups(kept_S, table),
        notes=(note,),
    )


def of_groups(wild_S: NDArray[np.bool_], table: SampleBatch) -> NDArray[np.bool_]:
    """Return the sequences of all groups that contain one of these."""
    return np.isin(table.group_S, table.group_S[wild_S])


def num_groups(kept_S: NDArray[np.bool_], table: SampleBatch) -> int:
    """Return the number of groups that are not kept."""
    return len({*table.group_S[~kept_S].tolist()})


def set_aside_note(kept_S: NDArray[np.bool_], table: SampleBatch) -> str:
    """Describe the groups that are not trained on."""
    groups = sorted({*table.group_S[~kept_S].tolist()})
    names = ", ".join(map(str, groups[:10])) + (" and others" if len(groups) > 10 else "")
    return f"group {names} is set aside" if len(groups) == 1 else f"groups {names} are set aside"


def sample_named(table: SampleBatch, row: int, sources: Sequence[str] = ()) -> str:
    """Name the sample that a sequence belongs to."""
    source = int(table.source_S[row])
    rollout = f" of {sources[source]}" if 0 <= source < len(sources) else ""
    return f"group {table.group_S[row]}, sample {table.sample_S[row]}{rollout}"


def not_finite(loss: Loss, batch: MicroBatch, scores: Scores) -> list[int]:
    """Return the sequences of a micro-batch, by place in the shard, that make a loss or its gradient not finite.

    A gradient counts as not finite if its square is not finite in float32. If only the loss is not, all sequences are
    returned.
    """
    value, squares_B = gradient_squares(loss, batch, scores)
    is_wild_B = ~squares_B.isfinite()
    if not (is_wild_B.any() or value.isfinite()):
        return [row for row in batch.rows if row != EMPTY_ROW]
    return [row for row, is_wild in zip(batch.rows, is_wild_B.tolist(), strict=True) if is_wild and row != EMPTY_ROW]


def gradient_squares(loss: Loss, batch: MicroBatch, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss, and the squared norm of its gradient by the scores of each sequence's tokens, ``[B]``."""
    leaves = type(scores)(*(leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in scores))
    with torch.enable_grad():
        value = loss(batch, leaves)
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
    squares_B = torch.zeros(len(batch.rows))
    for leaf in leaves:
        if leaf.grad is not None:
            squares_BT = leaf.grad.flatten(2).square().sum(dim=2) if leaf.grad.ndim > 2 else leaf.grad.square()
            # Without valid tokens, the model gets no gradient.
            squares_B += torch.where(batch.loss_mask_BT, squares_BT, 0.0).sum(dim=1).cpu()
    return value, squares_B


def finite_metrics(metrics: Mapping[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the metrics that are finite, and a line that names the others."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if len(finite) == len(metrics):
        return finite, ()
    listed = line(", ".join(f"{name} ({value})" for name, value in metrics.items() if name not in finite))
    return finite | {"metrics_not_finite": float(len(metrics) - len(finite))}, (
        f"metrics that are no finite number: {listed}",
    )


def set_aside_by_loss(batch: RankBatch, rows: Sequence[int], columns: Columns, model: Model) -> bool:
    """Set aside the groups of these sequences that make a model's loss not finite; tell whether others remain.

    `columns` are the loss inputs of that model.

    Nothing changes without groups, if none is found, or if no other is left, since the cause is not a sample then.
    Collective.
    """
    if not batch.config.declaration.rolls_out:
        return False
    loss = make_loss(batch.config, batch.counts(rows), batch.backend.device, model)
    found_S = torch.zeros(len(batch.table), dtype=torch.float64)
    shard = batch.shards[model]
    for micro_batch, scores in scored_by(batch, model, columns=columns):
        for place in not_finite(loss, micro_batch, scores):
            found_S[shard.rows[place]] = 1
    wild_S = shard.replicas.sum(found_S).cpu().numpy() > 0
    in_step_S = np.isin(np.arange(len(wild_S)), list(rows)) & (batch.table.num_valid_S > 0)
    kept_S = ~of_groups(wild_S & in_step_S, batch.table)
    if kept_S.all() or not (kept_S & in_step_S).any():
        return False
    first = sample_named(batch.table, int((wild_S & in_step_S).argmax()))
    aside = set_aside_note(kept_S, batch.table)
    of_model = "" if model == "policy" else f" of the {model} model"
    batch.notes.append(f"{first} has a loss or gradient{of_model} that is no finite number: {aside}")
    batch.metrics[BY_LOSS] = batch.metrics.get(BY_LOSS, 0.0) + num_groups(kept_S, batch.table)
    batch.keep(kept_S)
    return True


def name_outlier(batch: RankBatch, rows: Sequence[int], columns: Columns, model: Model, excess: str) -> None:
    """Note the sample that makes a model's loss or gradient out of all proportion, as `excess` says.

    With ``set_aside_outliers``, set aside the groups of samples that do so, if others remain. The sizes are those of
    the loss's gradient by the scores of each sequence's tokens: by parameters, each would take a pass of its own.
    Collective.
    """
    squares_S = _gradient_squares(batch, columns, model)
    squares_S[~np.isin(np.arange(len(squares_S)), list(rows))] = 0.0
    first, total = int(squares_S.argmax()), squares_S.sum()
    of_model = "" if model == "policy" else f" of the {model} model"
    share = f"has {squares_S[first] / (total or 1.0):.0%} of it, by the loss's gradient in tokens"
    if not batch.config.declaration.rolls_out:
        batch.notes.append(f"{excess}{of_model}; sequence {first + 1} of the step's {len(squares_S)} {share}")
        return
    note = f"{excess}{of_model}; {sample_named(batch.table, first)} {share}"
    if not batch.config.rollout_section.set_aside_outliers:
        batch.notes.append(f"{note} ({batch.config.algorithm}.set_aside_outliers sets such groups aside)")
        return
    wild_S = find_outliers(np.sqrt(squares_S))
    wild_S[first] |= bool(squares_S[first] > total / 2)
    kept_S = ~of_groups(wild_S, batch.table) if wild_S.any() else np.ones_like(wild_S)
    if kept_S.all() or not (kept_S & (squares_S > 0)).any():
        batch.notes.append(f"{note}: no group stands out, so that none is set aside")
        return
    batch.notes.append(f"{note}: {set_aside_note(kept_S, batch.table)}")
    batch.metrics[OUTLIERS] = batch.metrics.get(OUTLIERS, 0.0) + num_groups(kept_S, batch.table)
    batch.keep(kept_S)


def _gradient_squares(batch: RankBatch, columns: Columns, model: Model) -> NDArray[np.float64]:
    """Return the squared norm of the loss's gradient in each sequence of the whole batch. Collective."""
    squares_S = torch.zeros(len(batch.table), dtype=torch.float64)
    shard = batch.shards[model]
    every = [row for rows in batch.global_batches for row in rows]
    loss = make_loss(batch.config, batch.counts(every), batch.backend.device, model)
    for micro_batch, scores in scored_by(batch, model, columns=columns):
        _, squares_B = gradient_squares(loss, micro_batch, scores)
        for place, square in zip(micro_batch.rows, squares_B.tolist(), strict=True):
            if place != EMPTY_ROW:
                squares_S[shard.rows[place]] = square
    return np.asarray(shard.replicas.sum(squares_S).cpu().numpy())
