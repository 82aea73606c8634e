"""A batch of a training step before it is assigned to ranks: a table, and where the tokens are."""

from __future__ import annotations

import msgspec

from tandem.samples.batch import BatchTable, TrainingBatch


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A batch, as yet assigned to nobody."""

    table: BatchTable
    rollouts: tuple[str, ...] = ()
    """Those that have its samples, sorted: what `BatchTable.source_S` counts."""
    tokens: TrainingBatch | None = None
    """The sequences themselves, where nobody generated them."""
    notes: tuple[str, ...] = ()
    """What is to be known of its numbers, a line each."""
