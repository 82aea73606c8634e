"""How a batch is cut into micro-batches: so many sequences each, or so many tokens, padded or packed.

Pure functions of the batch and the configuration: every rank works out the same shares, its own and the others'.

Shapes: ``S`` sequences of the ragged batch, in ``U`` units of ``R`` each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.common.config.schema import DynamicBatching, Policy, SequencePacking
from tandem.trainer import bins, packing
from tandem.trainer.packing import EMPTY_ROW
from tandem.trainer.sharing import Prompts

Groups = list[tuple[int, ...]]
"""The sequences of each micro-batch; `EMPTY_ROW` for none."""


class Batching:
    """The micro-batches of one rank for one ragged batch.

    Args:
        policy: says how many sequences or tokens a micro-batch has.
        lengths_S: tokens of each sequence.
        rank: of the data-parallel ranks.
        num_ranks: data-parallel ranks.
        sequence_divisor: see `tandem.trainer.backend.Backend`.
        prompts: which sequences share a prompt and are best kept together, where micro-batches are so many sequences.
        unit: consecutive sequences of the batch that must stay together: with 2, sequences ``2 i`` and ``2 i + 1`` are
            rows ``2 j`` and ``2 j + 1`` of one micro-batch, and empty rows come in pairs as well. Batches and global
            batches must be whole numbers of units. Sizes of micro-batches that are not in tokens are in units.
    """

    def __init__(
        self,
        policy: Policy,
        lengths_S: NDArray[np.int32],
        *,
        rank: int,
        num_ranks: int,
        sequence_divisor: int = 1,
        prompts: Prompts | None = None,
        unit: int = 1,
    ) -> None:
        self._policy = policy
        self._rank, self._num_ranks = rank, num_ranks
        self._unit = unit
        # What is dealt and cut are units; rows only come in and go out.
        self._lengths_UR = lengths_S.astype(np.int64).reshape(-1, unit)
        self._lengths_U = self._lengths_UR.sum(axis=1)
        self._prompts = prompts if unit == 1 else None
        self._limits: SequencePacking | DynamicBatching | None = None
        self.divisible_by = math.lcm(policy.make_sequence_length_divisible_by, sequence_divisor)
        """Of the width of padded rows, and of the segments of packed ones."""
        self.row_divisible_by: int | None = None
        """Of packed rows; None where rows are padded."""
        if policy.sequence_packing.enabled:
            self._limits = policy.sequence_packing
            self.row_divisible_by = policy.sequence_packing.sequence_length_round
        elif policy.dynamic_batching.enabled:
            self._limits = policy.dynamic_batching
            self.divisible_by = math.lcm(self.divisible_by, policy.dynamic_batching.sequence_length_round)

    def training(self, rows: Sequence[int]) -> Groups:
        """Return this rank's micro-batches of a global batch: as many as on every other rank."""
        hands = self._deal(rows)
        if self._limits is None:
            return self._cut_by_sequences(hands[self._rank], self._policy.train_micro_batch_size)
        return self._cut_by_tokens(hands, self._limits.train_mb_tokens)

    def scoring(self, global_batches: Sequence[Sequence[int]], size: int | None = None) -> Groups:
        """Return micro-batches, for a forward pass alone, of all sequences that `training` gives this rank.

        `size` stands in for ``policy.logprob_batch_size`` where micro-batches are so many sequences.
        """
        dealt = [self._deal(rows) for rows in global_batches]
        hands = [[unit for hands in dealt for unit in hands[rank]] for rank in range(self._num_ranks)]
        if self._limits is None:
            return self._cut_by_sequences(hands[self._rank], size or self._policy.logprob_batch_size)
        return self._cut_by_tokens(hands, self._limits.logprob_mb_tokens)

    def _deal(self, rows: Sequence[int]) -> list[list[int]]:
        """Deal the units of these sequences to the ranks."""
        units = [row // self._unit for row in rows[:: self._unit]]
        if self._limits is None:
            return packing.deal(units, self._lengths_U, self._num_ranks, self._prompts)
        return deal_tokens(units, self._lengths_U, self._num_ranks)

    def _cut_by_sequences(self, hand: Sequence[int], size: int) -> Groups:
        return self._rows(packing.micro_batches_of(hand, self._lengths_U, size, self._prompts))

    def _cut_by_tokens(self, hands: Sequence[Sequence[int]], num_tokens: int) -> Groups:
        """Cut all hands, because each rank takes as many micro-batches as the one that needs the most."""
        cut = self._packed if self.row_divisible_by is not None else self._padded
        groups = [cut(hand, num_tokens) for hand in hands]
        missing = max(len(group) for group in groups) - len(groups[self._rank])
        return self._rows(groups[self._rank] + [(EMPTY_ROW,)] * missing)

    def _packed(self, hand: Sequence[int], num_tokens: int) -> Groups:
        assert isinstance(self._limits, SequencePacking)
        segments_UR = -(-self._lengths_UR[list(hand)] // self.divisible_by) * self.divisible_by
        lengths = segments_UR.sum(axis=1).tolist()
        # What rounding adds to the longest must not keep it out.
        packed = bins.pack(lengths, max(num_tokens, *lengths, 0), self._limits.algorithm)
        return [tuple(hand[index] for index in group) for group in packed]

    def _padded(self, hand: Sequence[int], num_tokens: int) -> Groups:
        """Put like lengths together, the longest first: as many units as the first one's width leaves room for."""
        widest_U = self._lengths_UR.max(axis=1)
        ordered = sorted(hand, key=lambda unit: (-int(widest_U[unit]), unit))
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


def deal_tokens(rows: Sequence[int], lengths_S: NDArray[np.int64], num_ranks: int) -> list[list[int]]:
    """Deal sequences so that the ranks have nearly equal tokens, whatever the number of sequences.

    The longest goes first, each to the rank that has the fewest tokens so far: no two ranks differ by more than one
    sequence has (Graham 1969, "Bounds on multiprocessing timing anomalies", section 4). Within a hand the order is that
    of `rows`.
    """
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for row in sorted(rows, key=lambda row: (-int(lengths_S[row]), row)):
        rank = tokens.index(min(tokens))
        hands[rank].append(row)
        tokens[rank] += int(lengths_S[row])
    return [sorted(hand) for hand in hands]
