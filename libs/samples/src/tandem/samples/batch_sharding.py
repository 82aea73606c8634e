"""The data-parallel shards of a batch: which of its sequences each trainer rank trains on; pure.

The coordinator divides the batch, and every rank reads its sequences from the batch's table
(`tandem.samples.batch.TABLE`). The ranks of one model-parallel group see the same sequences, and are one data-parallel
rank here.

Shapes: ``S`` sequences of a batch, in ``U`` units of sequences that must stay together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.config import Config
from tandem.config.schema.columns import Model
from tandem.samples.batch import SampleBatch

Ints = NDArray[np.int32] | NDArray[np.int64]

EMPTY_ROW = -1
"""A row without a sequence. It evens out the ranks' shards and counts nowhere."""
NO_RANK = -1
"""Data-parallel rank of a trainer that does not hold the policy. No sequence is in its shard."""
NO_PROMPT = -1
"""Number of a prompt that no other sequence shares."""


class BatchSharding(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which every batch of a run is divided into data-parallel shards."""

    num_ranks: int
    """Data-parallel ranks."""
    batch_size: int
    """Sequences of a global batch, if no sample has more than one."""
    unit: int
    """Consecutive sequences that must stay together. Batches are whole numbers of units."""
    by_tokens: bool
    """Whether ranks get nearly equal tokens, in any number of sequences; else equal numbers of sequences."""
    by_prompts: bool
    """Whether sequences that share a prompt stay together, as far as equal numbers allow."""

    @classmethod
    def of(cls, config: Config, *, shares_prompts: bool) -> Self:
        """Read it from a run's configuration; `shares_prompts` says whether trainers compute shared prompts once."""
        policy, unit = config.policy, config.sequences_per_sample
        return cls(
            num_ranks=config.data_parallel_size,
            batch_size=policy.train_global_batch_size * unit,
            unit=unit,
            by_tokens=policy.sequence_packing.enabled or policy.dynamic_batching.enabled,
            by_prompts=policy.share_prompts and shares_prompts and unit == 1,
        )

    def shard(self, table: SampleBatch, parts: Sequence[int] = ()) -> SampleBatch:
        """Return the table with the rank of each sequence; if there are `parts`, each is divided by itself."""
        ranks, first = [], 0
        for count in parts or [len(table)]:
            rows = slice(first, first + count)
            ranks.append(self.ranks(table.lengths_S[rows], table.prompt_S[rows], table.branch_S[rows]))
            first += count
        return table.replace(rank_S=np.concatenate(ranks))

    def ranks(self, lengths_S: Ints, prompt_S: Ints, branch_S: Ints | None = None) -> NDArray[np.int32]:
        """Return the data-parallel rank of each sequence; with no `branch_S`, each sample has one sequence."""
        if self.num_ranks == 1:
            return np.zeros(len(lengths_S), dtype=np.int32)
        rank_S = np.empty(len(lengths_S), dtype=np.int32)
        lengths_U = lengths_S.astype(np.int64).reshape(-1, self.unit).sum(axis=1)
        branch_S = np.zeros(len(lengths_S), dtype=np.int32) if branch_S is None else branch_S
        for rows in batches_of_samples(branch_S, self.batch_size):
            units = range(rows.start // self.unit, rows.stop // self.unit)
            if self.by_tokens:
                shards = shards_by_tokens(units, lengths_U, self.num_ranks)
            else:
                shards = shards_by_count(units, lengths_U, self.num_ranks, prompt_S if self.by_prompts else None)
            for rank, its_units in enumerate(shards):
                for unit in its_units:
                    if unit != EMPTY_ROW:
                        rank_S[unit * self.unit : (unit + 1) * self.unit] = rank
        return rank_S


def batches_of_samples(branch_S: Ints, size: int) -> list[range]:
    """Divide a rollout batch into the consecutive sequences of each optimizer step. The last may have fewer.

    Each has `size` samples, with all their sequences. A sample begins where `branch_S` is 0.
    """
    starts = np.flatnonzero(branch_S == 0)[::size].tolist()
    return list(map(range, starts, [*starts[1:], len(branch_S)]))


def shards_by_count(
    rows: Sequence[int], lengths_S: Sequence[int] | Ints, num_ranks: int, prompt_S: Ints | None = None
) -> list[list[int]]:
    """Divide the sequences of a global batch among the ranks: equal counts, nearly equal tokens.

    The longest go first, one to each rank, back and forth: the rank that got the longest of one round gets the shortest
    of the next. If the count is not divisible, `EMPTY_ROW` fills up. Sequences of equal `prompt_S` stay together as far
    as equal counts allow: they are given out in pieces of one size.
    """
    lengths = np.asarray(lengths_S, dtype=np.int64)
    shard_size = -(-len(rows) // num_ranks)
    num_empty = num_ranks * shard_size - len(rows)
    runs = group_by_prompt(rows, lengths, prompt_S)
    size = math.gcd(shard_size, num_empty, *map(len, runs))
    pieces = [run[first : first + size] for run in runs for first in range(0, len(run), size)]
    pieces.sort(key=lambda piece: (-int(lengths[piece].sum()), piece))
    pieces += [[EMPTY_ROW] * size] * (num_empty // size)
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    for number, first in enumerate(range(0, len(pieces), num_ranks)):
        next_ones = pieces[first : first + num_ranks]
        for shard, piece in zip(shards, next_ones if number % 2 == 0 else reversed(next_ones), strict=True):
            shard.extend(piece)
    return shards


def shards_by_tokens(rows: Sequence[int], lengths_S: NDArray[np.int64], num_ranks: int) -> list[list[int]]:
    """Divide sequences so that ranks have nearly equal tokens, in any number of sequences.

    The longest goes first, each to the rank that has the fewest tokens so far. So two ranks differ by the tokens of one
    sequence at most (Graham 1969, "Bounds on multiprocessing timing anomalies", section 4). Within a shard, the order
    is that of `rows`.
    """
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for row in sorted(rows, key=lambda row: (-int(lengths_S[row]), row)):
        rank = tokens.index(min(tokens))
        shards[rank].append(row)
        tokens[rank] += int(lengths_S[row])
    return [sorted(shard) for shard in shards]


def group_by_prompt(rows: Sequence[int], lengths_S: Sequence[int] | Ints, prompt_S: Ints | None) -> list[list[int]]:
    """Group sequences by their prompt, the longest first, and order the groups by their longest."""
    rows_U = np.array(rows, dtype=np.int64)
    ordered = rows_U[np.lexsort((rows_U, -np.asarray(lengths_S, dtype=np.int64)[rows_U]))].tolist()
    if prompt_S is None:
        return [[row] for row in ordered]
    runs: dict[int, list[int]] = {}
    for row in ordered:
        prompt = int(prompt_S[row])
        runs.setdefault(~row if prompt == NO_PROMPT else prompt, []).append(row)
    return [*runs.values()]


def data_parallel_ranks(config: Config, model: Model = "policy") -> list[int]:
    """Return the data-parallel rank of each trainer of the policy, or of each process of another model.

    Processes of one model-parallel group have the same. Both backends count tensor ranks fastest, then context ranks,
    then data ranks; Megatron-Core's pipeline stages come last of all.
    """
    settings, num_trainers = config.settings_of(model), config.processes_of[model]
    group_size = settings.model_parallel_size // _stages(config, model)
    num_ranks = num_trainers // settings.model_parallel_size
    return [rank // group_size % num_ranks for rank in range(num_trainers)]


def scoring_trainers(config: Config, model: Model = "policy") -> list[int]:
    """Return, for each data-parallel rank, the place of one trainer that has the model's outputs for its tokens.

    It is the first of the last pipeline stage, where the output layer is.
    """
    ranks = data_parallel_ranks(config, model)
    first = len(ranks) - len(ranks) // _stages(config, model)
    return [first + ranks[first:].index(rank) for rank in sorted({*ranks})]


def _stages(config: Config, model: Model) -> int:
    megatron = config.settings_of(model).megatron_cfg
    return megatron.pipeline_model_parallel_size if megatron.enabled else 1
