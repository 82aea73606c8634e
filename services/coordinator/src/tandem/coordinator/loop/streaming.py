"""The loop and batches of runs whose trainers get a step's groups as they come, then the whole step.

Each rank trains on the sequences that it was given first. So it fetches nothing twice, and the step's table says of
every sequence where its gradient is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import Listener, StreamGroups
from tandem.config import Config
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.loop.loop import CoordinatorLoop, MadeBatch, StepBatches
from tandem.coordinator.scheduler.events import DispatchBatch, DispatchGroups, SampleRecord
from tandem.samples.batch import SampleBatch, is_of_table

SequencePlace = tuple[int, int, int, int]
"""A sequence: the command that made it, its group, its place there, and its branch."""


class StreamingBatches(StepBatches):
    """The batches of a run's steps, and of their first groups."""

    def __init__(self, config: Config, algorithm: RunningAlgorithm, sources: Mapping[str, Listener] = {}) -> None:
        """Take the same as `StepBatches`."""
        super().__init__(config, algorithm, sources)
        assert isinstance(algorithm, GrpoAlgorithm), "the configuration's checks refuse others"
        self._grpo = algorithm
        self._step = 0
        self._rank_of: dict[SequencePlace, int] = {}
        """The rank that each sequence of the step was given to."""

    def make_of_groups(
        self, action: DispatchGroups, records: Sequence[SampleRecord]
    ) -> list[tuple[str, StreamGroups, dict[str, NDArray[Any]]]]:
        """Make the batch of some groups of a step; return each trainer's command with its table.

        `records` are all that there are of the step, in order.
        """
        numbers = {*action.groups}
        batch = self._grpo.batch_of_groups(action.step, [r for r in records if r.scored.group in numbers])
        batch = self._sharding.shard(batch)
        if action.step != self._step:
            self._step, self._rank_of = action.step, {}
        self._rank_of |= dict(zip(_places_of(batch), batch.rank_S.tolist(), strict=True))
        sources = {rollout: self._listeners[rollout] for rollout in batch.sources}
        table = {name: array for name, array in batch.columns.items() if is_of_table(name)}
        return [
            (trainer, StreamGroups(**fields, step=action.step, sources=sources), table)
            for trainer, fields in action.commands.items()
        ]

    def make(self, action: DispatchBatch, records: Sequence[SampleRecord]) -> MadeBatch:
        """Make the batch of a step, in which sequences stay with the ranks that have trained on them."""
        made_batch = super().make(action, records)
        if action.purpose != "train" or action.step != self._step:
            return made_batch
        batch = made_batch.batch
        rank_S = np.array([self._rank_of.get(place, -1) for place in _places_of(batch)], dtype=np.int32)
        new_rows = np.flatnonzero(rank_S < 0)
        if len(new_rows):
            rank_S[new_rows] = self._sharding.ranks(
                batch.lengths_S[new_rows], batch.prompt_S[new_rows], batch.branch_S[new_rows]
            )
        commands = [
            (trainer, command, {**arrays, "rank_S": rank_S}) for trainer, command, arrays in made_batch.commands
        ]
        return MadeBatch(batch.replace(rank_S=rank_S), made_batch.metrics, commands)


class StreamingLoop(CoordinatorLoop):
    """The loop of runs whose trainers get groups before their step is whole."""

    _batches: StreamingBatches

    def _send_batch(self, action: DispatchBatch | DispatchGroups) -> None:
        """Make the batch of a step, or of its groups that are there, and send each trainer its command."""
        if isinstance(action, DispatchBatch):
            super()._send_batch(action)
            return
        of_step = self.scheduler.tables.groups.of_step(action.step, "train")
        assert of_step is not None, "the step is in progress"
        for process, command, arrays in self._batches.make_of_groups(action, of_step.records()):
            self._send(process, command, arrays)


def _places_of(batch: SampleBatch) -> list[SequencePlace]:
    columns = (batch.command_S, batch.group_S, batch.sample_S, batch.branch_S)
    return [*zip(*(column.tolist() for column in columns), strict=True)]
