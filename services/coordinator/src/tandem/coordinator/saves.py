"""Saves: the checkpoint that trainers write while the run goes on. Pure, like the plan.

A save has two parts. Trainers copy what a checkpoint is made of, and the run waits for that; then each writes its copy
to disk, and the run goes on. A copy takes memory, so there is one at a time: a step that is to be saved while the one
before is still being written waits for that. To copy later is impossible, since the next step changes the weights, and
to leave out a checkpoint that was asked for would be no kindness.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.messages import AwaitCheckpoint, SaveCheckpoint
from tandem.coordinator.decisions import Action, Dispatch, Phase, PublishCheckpoint, RunShape
from tandem.coordinator.orders import Orders, Promise


class Saves:
    """At most one checkpoint on its way to the disk."""

    def __init__(self, shape: RunShape, orders: Orders) -> None:
        self._shape = shape
        self._orders = orders
        self._copied: int | None = None
        """The step that trainers copy, or have copied."""
        self._written: int | None = None
        """The step whose copies they write."""
        self._owed: set[str] = set()
        """Trainers that have not written all of their part."""

    @property
    def is_copied(self) -> bool:
        """Whether copies were ordered that are not being written yet."""
        return self._copied is not None

    @property
    def is_out(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._written is not None

    def copy(self, step: int, trainers: Sequence[str]) -> list[Action]:
        """Have trainers copy what they hold, which is the state after `step`; nothing is being written."""
        self._copied = step
        folder = self._shape.checkpoint_folder.format(step=step)
        return [
            Dispatch(member=rank, order=SaveCheckpoint(folder=folder, step=step, **self._promise(rank, Phase.SAVING)))
            for rank in trainers
        ]

    def write(self, trainers: Sequence[str]) -> list[Action]:
        """Have trainers say when what they have copied is on disk."""
        assert self._copied is not None, "copies come first"
        step, self._copied = self._copied, None
        self._written, self._owed = step, set(trainers)
        return [
            Dispatch(member=rank, order=AwaitCheckpoint(step=step, **self._promise(rank, Phase.WRITING)))
            for rank in trainers
        ]

    def take_written(self, member: str) -> list[Action]:
        """Take note that a trainer's part is on disk; with the last part, the checkpoint is whole."""
        self._owed.discard(member)
        if self._written is None or self._owed:
            return []
        publish = PublishCheckpoint(step=self._written)
        self._written = None
        return [publish]

    def is_owed_by(self, member: str) -> bool:
        """Whether the checkpoint cannot become whole without this process."""
        return self.is_out and member in self._owed

    def give_up(self) -> None:
        """A part is not going to be written."""
        self._written = None

    def _promise(self, rank: str, phase: Phase) -> Promise:
        return self._orders.promise(rank, phase, self._shape.deadlines.save)
