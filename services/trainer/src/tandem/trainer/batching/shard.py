"""The shards of a batch on a rank: sequences divided into micro-batches and padded to one width.

The division is a pure function of the batch's table and the configuration, so that every rank knows the number of
micro-batches of the others.

Shapes: ``S`` sequences of the whole batch, in ``U`` units of ``R`` each; ``T`` tokens of the shard. Within a
micro-batch ``B`` rows and ``T`` padded positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tandem.config import Config
from tandem.config.schema import DynamicBatching, ModelConfig, SequencePacking
from tandem.config.schema.columns import Model
from tandem.samples.batch import MASKS, SampleBatch
from tandem.samples.batch_sharding import EMPTY_ROW, Ints, batches_of_samples, group_by_prompt
from tandem.samples.routed_experts import COLUMN, FILL, RoutedExperts, replayed_experts
from tandem.samples.sampling_masks import MaskFormat, masks_of_run
from tandem.trainer.backend import ModelReplicas, TrainerBackend
from tandem.trainer.batching.masks import masks_on
from tandem.trainer.batching.packing import pack_row, packed_groups, padded_groups, shared_row
from tandem.trainer.losses import Counts
from tandem.trainer.micro_batches import Columns, Groups, MediaFormat, MicroBatch, move_to_device


class BatchShard:
    """The data-parallel shard of a batch for one replica of a model, divided into micro-batches.

    Args:
        settings: section of the model, with the sequences or tokens of a micro-batch.
        table: table of the batch, with the length and the rank of each sequence.
        samples: sequences that `table` assigns to this replica, with their tokens.
        replicas: replicas of the model.
        shares_prompts: whether the model computes shared prompts once. Micro-batches of a number of sequences then keep
            sequences with the same prompt together.
        unit: consecutive sequences of the batch that must stay together. With 2, sequences ``2 i`` and ``2 i + 1`` are
            rows ``2 j`` and ``2 j + 1`` of one micro-batch, and empty rows also come in pairs. Batches and global
            batches must be whole numbers of units. Sizes of micro-batches that are not in tokens are in units.
        experts: description of the experts to replay for each token; None without replay.
        media: format of what the model takes besides tokens; None for text alone.
        mask_format: format of the sampling masks to replay; None to score over the whole vocabulary.
    """

    def __init__(
        self,
        settings: ModelConfig,
        table: SampleBatch,
        samples: SampleBatch,
        replicas: ModelReplicas,
        *,
        shares_prompts: bool = False,
        unit: int = 1,
        experts: RoutedExperts | None = None,
        media: MediaFormat | None = None,
        mask_format: MaskFormat | None = None,
    ) -> None:
        self.table, self.samples, self.replicas = table, samples, replicas
        self.rows = rows = table.rows_of(replicas.rank)
        """The shard's sequences, as rows of the whole batch."""
        assert table.lengths_S[rows].tolist() == samples.lengths_S.tolist(), "the shard is what the table says"
        self._place_S = np.full(len(table) + 1, EMPTY_ROW)
        """Place of each sequence of the batch in the shard; the last stands for no sequence."""
        self._place_S[rows] = np.arange(len(rows))
        self._settings, self._experts, self._media = settings, experts, media
        self._mask_format = mask_format
        self._unit = unit
        # Units are assigned and divided. Rows only come in and go out.
        self._lengths_UR = table.lengths_S.astype(np.int64).reshape(-1, unit)
        self._lengths_U = self._lengths_UR.sum(axis=1)
        self._rank_U = table.rank_S[::unit]
        self._limits: SequencePacking | DynamicBatching | None = None
        self.divisible_by = math.lcm(settings.make_sequence_length_divisible_by, replicas.sequence_divisor)
        """Divisor of the width of padded rows, and of the segments of packed ones."""
        self.row_divisible_by: int | None = None
        """Divisor of the length of packed rows; None if rows are padded."""
        if settings.sequence_packing.enabled:
            self._limits = settings.sequence_packing
            self.row_divisible_by = settings.sequence_packing.sequence_length_round
        elif settings.dynamic_batching.enabled:
            self._limits = settings.dynamic_batching
            self.divisible_by = math.lcm(self.divisible_by, settings.dynamic_batching.sequence_length_round)
        self._shares_prompts = shares_prompts and self._limits is None
        self._prompt_S = table.prompt_S if self._shares_prompts and unit == 1 else None

    def laid_out(self, groups: Groups, device: torch.device, columns: Columns | None = None) -> list[MicroBatch]:
        """Return the micro-batches of these groups of sequences, with the loss inputs of the shard's tokens."""
        return [
            pad(
                self.samples,
                self._place_S[[*group]].tolist(),
                divisible_by=self.divisible_by,
                row_divisible_by=self.row_divisible_by,
                device=device,
                shares_prompts=self._shares_prompts,
                columns=columns,
                experts=self._experts,
                media=self._media,
                mask_format=self._mask_format,
            )
            for group in groups
        ]

    def training(self, rows: Sequence[int]) -> Groups:
        """Return this rank's micro-batches of a global batch, as many as on every other rank."""
        if self._limits is not None:
            return self._cut_by_tokens([rows], self._limits.train_mb_tokens)
        return self._cut_by_sequences(self._fill_up_units(rows), self._settings.train_micro_batch_size)

    def scoring(self, global_batches: Sequence[Sequence[int]], size: int | None = None) -> Groups:
        """Return micro-batches for forward passes over all sequences that `training` gives this rank.

        `size` replaces ``policy.logprob_batch_size`` if micro-batches are counted in sequences.
        """
        if self._limits is not None:
            return self._cut_by_tokens(global_batches, self._limits.logprob_mb_tokens)
        units = [unit for rows in global_batches for unit in self._fill_up_units(rows)]
        return self._cut_by_sequences(units, size or self._settings.logprob_batch_size)

    def _fill_up_units(self, rows: Sequence[int]) -> list[int]:
        """Return this rank's units, filled up with empty ones to the number of every rank."""
        unit_U = np.array(rows[:: self._unit], dtype=np.int64) // self._unit
        rank_U = self._rank_U[unit_U]
        rank_units: list[int] = unit_U[rank_U == self.replicas.rank].tolist()
        # The sequences of one teacher are not evenly assigned.
        size = int(np.bincount(rank_U, minlength=self.replicas.size).max())
        return rank_units + [EMPTY_ROW] * (size - len(rank_units))

    def _cut_by_sequences(self, units: Sequence[int], size: int) -> Groups:
        groups = micro_batches_of(units, self._lengths_U, size, self._prompt_S)
        return groups if self._unit == 1 else self._rows(groups)

    def _cut_by_tokens(self, global_batches: Sequence[Sequence[int]], num_tokens: int) -> Groups:
        """Divide the units of all ranks, since each takes as many micro-batches as the one that needs the most."""
        units = [rows[:: self._unit] for rows in global_batches]
        unit_U = np.array([*chain.from_iterable(units)], dtype=np.int64) // self._unit
        groups = [
            self._of_tokens(unit_U[self._rank_U[unit_U] == rank].tolist(), num_tokens)
            for rank in range(self.replicas.size)
        ]
        missing = max(map(len, groups)) - len(groups[self.replicas.rank])
        rank_groups = groups[self.replicas.rank] + [(EMPTY_ROW,)] * missing
        return rank_groups if self._unit == 1 else self._rows(rank_groups)

    def _of_tokens(self, units: list[int], num_tokens: int) -> Groups:
        if isinstance(self._limits, SequencePacking):
            return packed_groups(units, self._lengths_UR, num_tokens, self.divisible_by, self._limits.algorithm)
        return padded_groups(units, self._lengths_UR, num_tokens, self.divisible_by)

    def _rows(self, groups: Groups) -> Groups:
        """Return the sequences of the units."""
        return [tuple(row for unit in group for row in self._rows_of(unit)) for group in groups]

    def _rows_of(self, unit: int) -> Sequence[int]:
        if unit == EMPTY_ROW:
            return [EMPTY_ROW] * self._unit
        return range(unit * self._unit, (unit + 1) * self._unit)


class RankBatch:
    """A batch on this rank: its table, the shard of each model, and what a step notes of it.

    Rows refer to the whole batch's table. `media` is the format of what samples have besides tokens, if they do.
    """

    def __init__(
        self,
        backend: TrainerBackend,
        config: Config,
        table: SampleBatch,
        samples_of_models: Mapping[Model, tuple[SampleBatch, SampleBatch]],
        media: MediaFormat | None,
    ) -> None:
        """Take the table of a batch, and for each model held here a table and its sequences, the policy's first."""
        self.backend = backend
        self.config = config
        self.table = table
        self.shards: dict[Model, BatchShard] = {}
        """The shard of each model that this rank holds, the policy's first."""
        for model, (model_table, model_samples) in samples_of_models.items():
            settings = config.settings_of(model)
            self.shards[model] = BatchShard(
                settings,
                model_table,
                model_samples,
                backend.replicas(model),
                shares_prompts=settings.share_prompts and backend.shares_prompts,
                unit=config.sequences_per_sample,
                experts=replayed_experts(config, model) if config.policy.router_replay.enabled else None,
                media=media,
                mask_format=masks_of_run(config, model) if MASKS[0] in model_samples.columns else None,
            )
        self.shard = next(iter(self.shards.values()))
        """The policy's shard on this rank, or without the policy, that of its only model."""
        self.metrics: dict[str, float] = {}
        """Metrics from the filling of columns."""
        self.notes: list[str] = []
        """The groups that were set aside, with the reason."""
        size = config.policy.train_global_batch_size * config.sequences_per_sample
        self.global_batches = batches_of_samples(table.branch_S, size)
        self.num_steps = config.num_passes * len(self.global_batches)
        """Optimizer steps of each model in this step."""
        self.read = config.all_columns(self.num_steps)
        """The columns that the losses of all models read in this step."""

    def counts(self, rows: Sequence[int]) -> Counts:
        """Return the divisors of means over these sequences on all ranks."""
        counted = self.table.num_valid_S[list(rows)]
        positive = int(counted[self.table.rewards_S[list(rows)] > 0].sum())
        return Counts(tokens=int(counted.sum()), sequences=int((counted > 0).sum()), positive_tokens=positive)

    def numbers(self, batches: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return the metrics that count these global batches."""
        num_tokens = num_samples = 0
        for rows in batches:
            counts = self.counts(rows)
            num_tokens += counts.tokens
            num_samples += counts.sequences // self.config.sequences_per_sample
        return {"num_valid_tokens": float(num_tokens), "num_valid_samples": float(num_samples)}

    def keep(self, kept_S: NDArray[np.bool_]) -> None:
        """Mask the sequences of the batch that are not kept."""
        num_valid_S = self.table.num_valid_S
        self.table = self.table.replace(num_valid_S=np.where(kept_S, num_valid_S, 0).astype(num_valid_S.dtype))
        for shard in self.shards.values():
            shard.samples = shard.samples.keep_sequences(kept_S[shard.rows])


def micro_batches_of(
    rows: Sequence[int],
    lengths_S: Sequence[int] | Ints,
    size: int,
    prompt_S: Ints | None = None,
) -> list[tuple[int, ...]]:
    """Group a rank's sequences into micro-batches of at most `size`, with similar lengths together to pad little.

    Sequences of equal `prompt_S` are adjacent, so a `size` that is a multiple of the samples of a prompt splits no
    group. The number of micro-batches depends only on the number of rows, so that equal shards take equal numbers of
    passes.
    """
    rows_U = np.array(rows, dtype=np.int64)
    ordered = [*chain.from_iterable(group_by_prompt(rows_U[rows_U != EMPTY_ROW], lengths_S, prompt_S))]
    ordered += [EMPTY_ROW] * (len(rows) - len(ordered))
    return [tuple(ordered[first : first + size]) for first in range(0, len(ordered), size)]


def pad(
    batch: SampleBatch,
    rows: Sequence[int],
    *,
    divisible_by: int,
    device: torch.device,
    shares_prompts: bool = False,
    row_divisible_by: int | None = None,
    columns: Columns | None = None,
    experts: RoutedExperts | None = None,
    media: MediaFormat | None = None,
    mask_format: MaskFormat | None = None,
) -> MicroBatch:
    """Lay the given sequences out as a micro-batch, with a width that is a multiple of `divisible_by`.

    Args:
        batch: batch with the sequences.
        rows: rows of the batch; `EMPTY_ROW` for none.
        divisible_by: divisor of the width, and of the segments of a packed row.
        device: device of the result.
        shares_prompts: whether to add the row that holds each prompt once, if any two sequences share one.
        row_divisible_by: divisor of the length of the packed row, which is added if this is given.
        columns: loss inputs for each of the batch's tokens; None for scoring only.
        experts: description of the experts that the batch's tokens went to; None without replay.
        media: format of what the model takes besides tokens; None for text alone.
        mask_format: format of the batch's sampling masks; None to score over the whole vocabulary.

    """
    rows_B = np.array(rows, dtype=np.int64)
    lengths_B = np.append(batch.lengths_S.astype(np.int64), 0)[rows_B]  # `EMPTY_ROW` is the last
    width = -(-max(1, int(lengths_B.max())) // divisible_by) * divisible_by
    filled_BT = np.arange(width)[None, :] < lengths_B[:, None]
    sources = (batch.offsets()[rows_B, None] + np.arange(width)[None, :])[filled_BT]

    def padded(values_T: NDArray[Any], dtype: DTypeLike, fill: float = 0) -> NDArray[Any]:
        values_BT = np.full((*filled_BT.shape, *values_T.shape[1:]), fill, dtype=dtype)
        values_BT[filled_BT] = values_T[sources]
        return values_BT

    token_ids_BT = padded(batch.token_ids_T, np.int64)
    # A real token: the embedding of padding may be zero, where the norms of some models (Gemma 3n) have no gradient.
    filler = int(batch.token_ids_T[0]) if len(batch.token_ids_T) and media is None else 0
    token_ids_BT[lengths_B == 0] = filler
    valid_BT = padded(batch.valid(), np.bool_)
    routed_BTX = routed_BTLK = None
    if experts is not None and COLUMN in batch.columns:  # an empty shard has no columns
        routed_BTX = padded(batch.columns[COLUMN], np.uint8, fill=FILL)
        routed_BTLK = move_to_device(experts.decode_rows(routed_BTX), device)
    row = None
    if row_divisible_by is not None:
        divisors = {"divisible_by": divisible_by, "row_divisible_by": row_divisible_by}
        row = pack_row(token_ids_BT, lengths_B, valid_BT, **divisors, filler=filler, device=device)
    elif shares_prompts:
        row = shared_row(batch, rows, token_ids_BT, valid_BT, routed_BTX, divisible_by=divisible_by, device=device)
    return MicroBatch(
        rows=tuple(rows),
        lengths_B=move_to_device(lengths_B, device),
        token_ids_BT=move_to_device(token_ids_BT, device),
        attention_mask_BT=move_to_device(filled_BT, device),
        loss_mask_BT=move_to_device(valid_BT, device),
        columns={
            column.name: move_to_device(padded(values_T, column.dtype, column.fill), device)
            for column, values_T in (columns or {}).items()
        },
        row=row,
        routed_experts_BTLK=routed_BTLK,
        media=None if media is None else media.lay_out(batch, rows, token_ids_BT, lengths_B, row, device),
        masks=None
        if mask_format is None
        else masks_on(device, batch, sources[valid_BT[filled_BT]], mask_format.bitmap_words),
    )


def unpad_into(values_T: NDArray[Any], values_BT: torch.Tensor, batch: SampleBatch, rows: Sequence[int]) -> None:
    """Write a micro-batch's padded values back to the positions of their tokens in the ragged batch."""
    ends_S = np.cumsum(batch.lengths_S, dtype=np.int64)
    padded = values_BT.detach().cpu().numpy()
    for values, row in zip(padded, rows, strict=True):
        if row != EMPTY_ROW:
            length = int(batch.lengths_S[row])
            values_T[ends_S[row] - length : ends_S[row]] = values[:length]
