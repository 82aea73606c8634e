"""Saving: the checkpoint that trainers write while the run goes on.

A save has two parts. Trainers copy what a checkpoint is made of, and the run waits for that. Then each writes its copy
to disk, and the run goes on. A copy takes memory, so there is only one at a time. A step that is to be saved waits
while the checkpoint before is being written: the next step changes the weights, so it cannot be copied later.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.messages import AwaitCheckpoint, SaveCheckpoint
from tandem.coordinator.scheduler.agenda import Changed, Tracked
from tandem.coordinator.scheduler.events import Action, CommandFields, DispatchCommand, PublishCheckpoint
from tandem.coordinator.scheduler.phases import RunPhase
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec


class CheckpointSaving(Tracked):
    """At most one checkpoint on its way to the disk."""

    def __init__(self, spec: RunSpec, requests: PendingRequests, changed: Changed) -> None:
        super().__init__(changed)
        self._spec = spec
        self._requests = requests
        self.copied: int | None = None
        """The step that trainers copy, or have copied and do not write yet."""
        self._written: int | None = None
        """The step of the copies that they write."""
        self._awaited: set[str] = set()
        """Trainers that have not written all of their part."""

    @property
    def is_out(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._written is not None

    def copy(self, step: int, trainers: Sequence[str]) -> list[Action]:
        """Copy on the trainers what they hold, which is the state after `step`. No checkpoint is being written."""
        self.copied = step
        folder = self._spec.checkpoint_folder.format(step=step)
        return [
            DispatchCommand(
                process=rank, command=SaveCheckpoint(folder=folder, step=step, **self._fields(rank, RunPhase.SAVING))
            )
            for rank in trainers
        ]

    def write(self, trainers: Sequence[str]) -> list[Action]:
        """Ask trainers to report when their copies are on disk."""
        assert self.copied is not None, "copies come first"
        step, self.copied = self.copied, None
        self._written, self._awaited = step, set(trainers)
        return [
            DispatchCommand(process=rank, command=AwaitCheckpoint(step=step, **self._fields(rank, RunPhase.WRITING)))
            for rank in trainers
        ]

    def take_written(self, process: str) -> None:
        """Note that a trainer's part is on disk. With the last part, the checkpoint is whole."""
        self._awaited = self._awaited - {process}

    @property
    def publishable_step(self) -> int | None:
        """The step of a whole checkpoint that can be published; None if there is none."""
        return None if self._awaited else self._written

    def publish(self) -> list[Action]:
        """Give the whole checkpoint its final name."""
        assert self._written is not None, "asked when it is whole"
        publish = PublishCheckpoint(step=self._written)
        self._written = None
        return [publish]

    def is_awaited_from(self, process: str) -> bool:
        """Whether the checkpoint cannot become whole without this process."""
        return self.is_out and process in self._awaited

    def give_up(self) -> None:
        """Give up the checkpoint, as a part is not going to be written."""
        self._written = None

    def _fields(self, rank: str, phase: RunPhase) -> CommandFields:
        return self._requests.open(rank, phase, self._spec.deadlines.save)
