"""Requests to record a step's samples, built from the contents of its batch; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.common.messages import Purpose, RecordedGroup, RecordSamples
from tandem.coordinator.scheduler.events import DispatchRecord, SampleRecord

Place = tuple[str, int, int, int]
"""Place of a sample: its engine, its request, its group, and its index there."""


class RecordCommands:
    """The samples that steps were trained on and validated on, until they are recorded."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, Purpose], dict[str, tuple[RecordedGroup, ...]]] = {}
        """Groups by step and purpose, and by engine."""

    def keep(
        self,
        step: int,
        purpose: Purpose,
        records: Sequence[SampleRecord],
        advantages: Mapping[Place, float] = {},
    ) -> None:
        """Keep the samples of a step, with the advantages of those in its batch; or its validation samples."""
        of_step = self._groups[step, purpose] = {}
        found: dict[str, dict[tuple[int, int], list[float | None]]] = {}
        for record in records:
            scored = record.scored
            of_group = found.setdefault(record.rollout, {}).setdefault((record.command_id, scored.group), [])
            of_group.append(advantages.get((record.rollout, record.command_id, scored.group, scored.sample)))
        for rollout, groups in found.items():
            of_step[rollout] = tuple(
                RecordedGroup(command_id=command_id, group=group, advantages=tuple(of_group))
                for (command_id, group), of_group in groups.items()
            )

    def command(self, action: DispatchRecord) -> RecordSamples:
        """Return the request for a step's samples of one engine."""
        return RecordSamples(
            command_id=action.command_id,
            deadline_s=action.deadline_s,
            step=action.step,
            rollout=action.rollout,
            purpose=action.purpose,
            groups=self._groups[action.step, action.purpose][action.rollout],
        )

    def forget(self, step: int, purpose: Purpose) -> None:
        """Forget a step that is recorded."""
        self._groups.pop((step, purpose), None)
