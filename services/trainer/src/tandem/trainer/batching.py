"""Cut a rank's share of a batch into micro-batches: by sequences or by tokens, padded or packed.

Pure functions of the batch's table and the configuration: every rank works out how many the others have.

Shapes: ``S`` sequences of the ragged batch, in ``U`` units of ``R`` each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.config.schema import DynamicBatching, Model, SequencePacking
from tandem.samples.assignment import EMPTY_ROW, Ints
from tandem.trainer import bins, packing

Groups = list[tuple[int, ...]]
"""The sequences of each micro-batch; `EMPTY_ROW` for none."""


class Batching:
    """The micro-batches of one rank for one ragged batch.

    Args:
        settings: of the model; they say how many sequences or tokens a micro-batch has.
        lengths_S: tokens of each sequence.
        rank_S: the data-parallel rank that each sequence is assigned to (`tandem.samples.assignment`).
        rank: of the data-parallel ranks.
        num_ranks: data-parallel ranks.
        sequence_divisor: see `tandem.trainer.backend.Backend`.
        prompt_S: which sequences share a prompt and are best kept together, where micro-batches are so many sequences.
        unit: consecutive sequences of the batch that must stay together: with 2, sequences ``2 i`` and ``2 i + 1`` are
            rows ``2 j`` and ``2 j + 1`` of one micro-batch, and empty rows come in pairs as well. Batches and global
            batches must be whole numbers of units. Sizes of micro-batches that are not in tokens are in units.
    """

    def __init__(
        self,
        settings: Model,
        lengths_S: NDArray[np.int32],
        rank_S: Ints,
        *,
        rank: int,
        num_ranks: int,
        sequence_divisor: int = 1,
        prompt_S: Ints | None = None,
        unit: int = 1,
    ) -> None:
        self._settings = settings
        self._rank, self._num_ranks = rank, num_ranks
        self._unit = unit
        # What is assigned and cut are units; rows only come in and go out.
        self._lengths_UR = lengths_S.astype(np.int64).reshape(-1, unit)
        self._lengths_U = self._lengths_UR.sum(axis=1)
        self._rank_U = rank_S[::unit]
        self._prompt_S = prompt_S if unit == 1 else None
        self._limits: SequencePacking | DynamicBatching | None = None
        self.divisible_by = math.lcm(settings.make_sequence_length_divisible_by, sequence_divisor)
        """Of the width of padded rows, and of the segments of packed ones."""
        self.row_divisible_by: int | None = None
        """Of packed rows; None where rows are padded."""
        if settings.sequence_packing.enabled:
            self._limits = settings.sequence_packing
            self.row_divisible_by = settings.sequence_packing.sequence_length_round
        elif settings.dynamic_batching.enabled:
            self._limits = settings.dynamic_batching
            self.divisible_by = math.lcm(self.divisible_by, settings.dynamic_batching.sequence_length_round)

    def training(self, rows: Sequence[int]) -> Groups:
        """Return this rank's micro-batches of a global batch: as many as on every other rank."""
        if self._limits is None:
            return self._cut_by_sequences(self._equal_share(rows), self._settings.train_micro_batch_size)
        return self._cut_by_tokens([rows], self._limits.train_mb_tokens)

    def scoring(self, global_batches: Sequence[Sequence[int]], size: int | None = None) -> Groups:
        """Return micro-batches, for a forward pass alone, of all sequences that `training` gives this rank.

        `size` stands in for ``policy.logprob_batch_size`` where micro-batches are so many sequences.
        """
        if self._limits is None:
            share = [unit for rows in global_batches for unit in self._equal_share(rows)]
            return self._cut_by_sequences(share, size or self._settings.logprob_batch_size)
        return self._cut_by_tokens(global_batches, self._limits.logprob_mb_tokens)

    def _share(self, rows: Sequence[int], rank: int) -> list[int]:
        """Return the units of these sequences that a rank is assigned."""
        units = np.array(rows[:: self._unit], dtype=np.int64) // self._unit
        return [int(unit) for unit in units[self._rank_U[units] == rank]]

    def _equal_share(self, rows: Sequence[int]) -> list[int]:
        """Return those of this rank, filled up with empty rows to as many as every rank takes."""
        share = self._share(rows, self._rank)
        # Sequences of one teacher are not shared out evenly.
        size = max(len(self._share(rows, rank)) for rank in range(self._num_ranks))
        return share + [EMPTY_ROW] * (size - len(share))

    def _cut_by_sequences(self, share: Sequence[int], size: int) -> Groups:
        return self._rows(packing.micro_batches_of(share, self._lengths_U, size, self._prompt_S))

    def _cut_by_tokens(self, global_batches: Sequence[Sequence[int]], num_tokens: int) -> Groups:
        """Cut all shares, because each rank takes as many micro-batches as the one that needs the most."""
        cut = self._packed if self.row_divisible_by is not None else self._padded
        shares = [[unit for rows in global_batches for unit in self._share(rows, r)] for r in range(self._num_ranks)]
        groups = [cut(share, num_tokens) for share in shares]
        missing = max(len(group) for group in groups) - len(groups[self._rank])
        return self._rows(groups[self._rank] + [(EMPTY_ROW,)] * missing)

    def _packed(self, share: list[int], num_tokens: int) -> Groups:
        assert isinstance(self._limits, SequencePacking)
        segments_UR = -(-self._lengths_UR[share] // self.divisible_by) * self.divisible_by
        lengths = segments_UR.sum(axis=1).tolist()
        # What rounding adds to the longest must not keep it out.
        packed = bins.pack(lengths, max(num_tokens, *lengths, 0), self._limits.algorithm)
        return [tuple(share[index] for index in group) for group in packed]

    def _padded(self, share: Sequence[int], num_tokens: int) -> Groups:
        """Put like lengths together, the longest first: as many units as the first one's width leaves room for."""
        widest_U = self._lengths_UR.max(axis=1)
        ordered = sorted(share, key=lambda unit: (-int(widest_U[unit]), unit))
        groups: Groups = []
        while ordered:
            width = -(-int(widest_U[ordered[0]]) // self.divisible_by) * self.divisible_by
            size = max(1, num_tokens // (max(1, width) * self._unit))
            groups.append(tuple(ordered[:size]))
            ordered = ordered[size:]
        return groups

    def _rows(self, groups: Groups) -> Groups:
        """Return the sequences of the units."""
        return [tuple(row for unit in group for row in self._rows_of(unit)) for group in groups]

    def _rows_of(self, unit: int) -> Sequence[int]:
        if unit == EMPTY_ROW:
            return [EMPTY_ROW] * self._unit
        return range(unit * self._unit, (unit + 1) * self._unit)
