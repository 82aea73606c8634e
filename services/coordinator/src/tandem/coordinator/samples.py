"""Records of finished samples, whose tokens stay where they were made, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.common.batch import BatchTable, TrainingBatch
from tandem.common.messages import Purpose, SampleScored, SamplesFinished

Key = tuple[int, Purpose]


class SampleRecord(msgspec.Struct, frozen=True):
    """One sample, and where its tokens lie."""

    scored: SampleScored
    rollout: str
    command_id: int
    """Of the order to generate that it was made for."""


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A batch, as yet assigned to nobody."""

    table: BatchTable
    rollouts: tuple[str, ...] = ()
    """Those that have its samples, sorted: what `BatchTable.source_S` counts."""
    tokens: TrainingBatch | None = None
    """The sequences themselves, where nobody generated them."""


class SampleRecords:
    """Keeps what is known of finished samples by step and purpose until they are dropped, each exactly once."""

    def __init__(self) -> None:
        self._kept: dict[Key, dict[tuple[int, int], SampleRecord]] = {}

    def add(self, rollout: str, message: SamplesFinished) -> None:
        """Keep the samples of one message; a sample that is here already, because its order was repeated, stays."""
        kept = self._kept.setdefault((message.step, message.purpose), {})
        for scored in message.samples:
            kept.setdefault((scored.group, scored.sample), SampleRecord(scored, rollout, message.command_id))

    def count(self, step: int, purpose: Purpose) -> int:
        """Return how many samples are here."""
        return len(self._kept.get((step, purpose), {}))

    def peek(self, step: int, purpose: Purpose) -> list[SampleRecord]:
        """Return the samples, ordered by group and sample whatever order they came in."""
        kept = self._kept[(step, purpose)]
        return [kept[key] for key in sorted(kept)]

    def discard(self, step: int, purpose: Purpose, groups: Sequence[int]) -> None:
        """Forget the samples of these groups, which will be made again."""
        kept = self._kept.get((step, purpose), {})
        self._kept[(step, purpose)] = {key: record for key, record in kept.items() if key[0] not in groups}

    def drop(self, step: int, purpose: Purpose) -> None:
        """Forget the samples of a step that is done, or abandoned."""
        self._kept.pop((step, purpose), None)
