"""Samples that have arrived and were not used yet."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.batch import SampleArrays
from tandem.common.messages import Purpose, SampleScored, SamplesFinished
from tandem.common.wire import Arrays

Key = tuple[int, Purpose]


class SampleStore:
    """Keeps finished samples by step and purpose until they are dropped, each exactly once."""

    def __init__(self) -> None:
        self._parts: dict[Key, dict[tuple[int, int], tuple[SampleScored, SampleArrays]]] = {}

    def add(self, message: SamplesFinished, arrays: Arrays) -> None:
        """Keep the samples of one message; a sample that is here already, because its order was repeated, stays."""
        bundle = SampleArrays.from_frames(arrays)
        kept = self._parts.setdefault((message.step, message.purpose), {})
        for row, sample in enumerate(message.samples):
            kept.setdefault((sample.group, sample.sample), (sample, bundle.take([row])))

    def count(self, step: int, purpose: Purpose) -> int:
        """Return how many samples are here."""
        return len(self._parts.get((step, purpose), {}))

    def peek(self, step: int, purpose: Purpose) -> tuple[list[SampleScored], SampleArrays]:
        """Return the samples, ordered by group and sample whatever order they came in."""
        kept = self._parts[(step, purpose)]
        ordered = [kept[key] for key in sorted(kept)]
        return [sample for sample, _ in ordered], SampleArrays.concatenate([arrays for _, arrays in ordered])

    def discard(self, step: int, purpose: Purpose, groups: Sequence[int]) -> None:
        """Forget the samples of these groups, which will be made again."""
        kept = self._parts.get((step, purpose), {})
        self._parts[(step, purpose)] = {key: part for key, part in kept.items() if key[0] not in groups}

    def drop(self, step: int, purpose: Purpose) -> None:
        """Forget the samples of a step that is done, or abandoned."""
        self._parts.pop((step, purpose), None)
