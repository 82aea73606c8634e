"""Steps: the step in progress, the checkpoint, and the rollout log.

The rollout log: a part is best written by the rollout that made its samples. These are on disk since they finished, so
that another rollout can write the part if that one is lost. Only two things wait for the log: a checkpoint is not
published before the log has its steps, and the run does not end before the log is whole. A part that cannot be written,
or takes too long, is given up with a notice, and the run goes on.

A save has two parts. Trainers copy what a checkpoint is made of, and the run waits for that. Then each writes its copy
to disk, and the run goes on. A copy takes memory, so there is only one at a time. A step that is to be saved waits
while the checkpoint before is being written: the next step changes the weights, so it cannot be copied later.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from tandem.common.messages import AwaitCheckpoint, Purpose, SamplesRecorded, SaveCheckpoint
from tandem.coordinator.scheduler import agenda, events, requests
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec


class CheckpointSaving(agenda.Tracked):
    """At most one checkpoint on its way to the disk."""

    def __init__(self, spec: RunSpec, requests: PendingRequests, changed: agenda.Changed) -> None:
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

    def copy(self, step: int, trainers: Sequence[str]) -> list[events.Action]:
        """Copy on the trainers what they hold, which is the state after `step`. No checkpoint is being written."""
        self.copied = step
        folder = self._spec.checkpoint_folder.format(step=step)
        return [
            events.DispatchCommand(
                process=rank,
                command=SaveCheckpoint(folder=folder, step=step, **self._fields(rank, requests.RunPhase.SAVING)),
            )
            for rank in trainers
        ]

    def write(self, trainers: Sequence[str]) -> list[events.Action]:
        """Ask trainers to report when their copies are on disk."""
        assert self.copied is not None, "copies come first"
        step, self.copied = self.copied, None
        self._written, self._awaited = step, set(trainers)
        return [
            events.DispatchCommand(
                process=rank, command=AwaitCheckpoint(step=step, **self._fields(rank, requests.RunPhase.WRITING))
            )
            for rank in trainers
        ]

    def take_written(self, process: str) -> None:
        """Note that a trainer's part is on disk. With the last part, the checkpoint is whole."""
        self._awaited = self._awaited - {process}

    @property
    def publishable_step(self) -> int | None:
        """The step of a whole checkpoint that can be published; None if there is none."""
        return None if self._awaited else self._written

    def publish(self) -> list[events.Action]:
        """Give the whole checkpoint its final name."""
        assert self._written is not None, "asked when it is whole"
        publish = events.PublishCheckpoint(step=self._written)
        self._written = None
        return [publish]

    def is_awaited_from(self, process: str) -> bool:
        """Whether the checkpoint cannot become whole without this process."""
        return self.is_out and process in self._awaited

    def give_up(self) -> None:
        """Give up the checkpoint, as a part is not going to be written."""
        self._written = None

    def _fields(self, rank: str, phase: requests.RunPhase) -> events.CommandFields:
        return self._requests.open(rank, phase, self._spec.deadlines.save)


class RolloutPart(msgspec.Struct, frozen=True):
    """The samples that a step had of one rollout."""

    step: int
    purpose: Purpose
    rollout: str


class RolloutRecording:
    """Parts of the rollout log that are not written yet. Does nothing if no log is kept."""

    def __init__(self, spec: RunSpec, requests: PendingRequests, changed: agenda.Changed) -> None:
        self._changed = changed
        self._is_on = bool(spec.samples_folder)
        self._allowed_s = spec.deadlines.save
        self._requests = requests
        self.waiting: dict[RolloutPart, float] = {}
        """The parts that no rollout was asked for, and the time until which they may wait."""
        self._asked: dict[int, RolloutPart] = {}
        """The parts that rollouts were asked for, by the id of the command."""
        self._num_left: dict[tuple[int, Purpose], int] = {}
        """The parts of each step that are not written or given up, or of its validation."""
        self._num_bytes: dict[tuple[int, Purpose], int] = {}
        """Bytes written so far for each step that is not whole, or for its validation."""
        self._rollouts: dict[tuple[int, Purpose], list[str]] = {}
        """The rollouts with written parts, by step."""
        self._able: dict[str, None] = {}
        """The rollouts that can be asked."""
        self._said: set[str] = set()

    def is_pending(self, up_to: int) -> bool:
        """Tell whether a part of a step, or of one before it, has yet to be written."""
        return any(step <= up_to for step, _ in self._num_bytes)

    def is_awaited_from(self, rollout: str) -> bool:
        """Tell whether a part with a rollout's samples, or one that it was asked for, has yet to be written."""
        parts = [*self.waiting, *self._asked.values()]
        return any(part.rollout == rollout for part in parts) or any(
            self._requests.of(rollout, requests.RunPhase.RECORDING)
        )

    def begin(self, step: int, purpose: Purpose, rollouts: set[str]) -> bool:
        """Log all samples that a step had of these rollouts, for training or validation.

        Return whether they will be logged.
        """
        if self._is_on and rollouts:
            until = self._requests.now + self._allowed_s
            for rollout in sorted(rollouts):
                self.waiting[RolloutPart(step, purpose, rollout)] = until
            self._num_left[step, purpose] = len(rollouts)
            self._num_bytes[step, purpose], self._rollouts[step, purpose] = 0, []
            self._changed()
        return self._is_on and bool(rollouts)

    def run_rule(self) -> list[events.Action] | None:
        """Ask rollouts to write the parts that wait; None if none waits, or there is no rollout to ask."""
        actions: list[events.Action] = []
        for part in [*self.waiting] if self._able else []:
            process = part.rollout if part.rollout in self._able else next(iter(self._able))
            fields = self._requests.open(process, requests.RunPhase.RECORDING, self._allowed_s)
            del self.waiting[part]
            self._asked[fields["command_id"]] = part
            of_part = msgspec.structs.asdict(part)
            actions.append(events.DispatchRecord(process=process, **of_part, **fields))
            self._changed()
        return actions or None

    def take_built(self, rollout: str) -> None:
        """Note that a rollout can be asked."""
        self._able[rollout] = None
        self._changed()

    def take_loss(self, rollout: str) -> None:
        """Note that a rollout is lost. The parts that it was asked for wait again."""
        self._able.pop(rollout, None)
        for request in [*self._requests.of(rollout, requests.RunPhase.RECORDING)]:
            self._requests.close(request.command_id)
            self.waiting[self._asked.pop(request.command_id)] = request.deadline
        self._changed()

    def take_recorded(self, reply: SamplesRecorded) -> list[events.Action]:
        """Note that a part is written. With the last one, its step is whole."""
        part = self._asked.pop(reply.command_id)
        missing = f"{reply.num_missing} samples of {part.rollout} were not written when they finished"
        notices = self._say(part, missing) if reply.num_missing else []
        self._rollouts[part.step, part.purpose].append(part.rollout)
        return [*notices, *self._close(part, reply.num_bytes)]

    def take_failure(self, command_id: int, reason: str) -> list[events.Action]:
        """Give up a part that could not be written."""
        part = self._asked.pop(command_id)
        return [*self._say(part, f"those of {part.rollout}: {reason}"), *self._close(part)]

    def give_up_late(self) -> list[events.Action]:
        """Give up the parts that have waited too long for a rollout."""
        late = [part for part, until in self.waiting.items() if self._requests.now > until]
        actions: list[events.Action] = []
        for part in late:
            del self.waiting[part]
            actions += [*self._say(part, f"those of {part.rollout}: no rollout is there"), *self._close(part)]
        return actions

    def _close(self, part: RolloutPart, num_bytes: int = 0) -> list[events.Action]:
        key = part.step, part.purpose
        self._num_bytes[key] += num_bytes
        self._num_left[key] -= 1
        self._changed()
        if self._num_left[key]:
            return []
        del self._num_left[key]
        rollouts, num_bytes = self._rollouts.pop(key), self._num_bytes.pop(key)
        recorded = events.StepRecorded(
            step=part.step, purpose=part.purpose, rollouts=tuple(rollouts), num_bytes=num_bytes
        )
        return [recorded]

    def _say(self, part: RolloutPart, gap: str) -> list[events.Action]:
        """Report what the rollout log lacks, once for each reason."""
        if gap in self._said:
            return []
        self._said.add(gap)
        kind = "samples" if part.purpose == "train" else "validation samples"
        return [events.TellUser(text=f"{kind} of step {part.step} are missing in the record: {gap}")]


class StepState(enum.IntEnum):
    """How far the step in progress is. Each state comes after those before it."""

    GENERATING = 0
    """Its groups are generated, or its batch waits."""
    TRAINING = 1
    TRAINED = 2
    """The optimizer has stepped. The weights that a run starts with count as a trained step."""
    VALIDATING = 3
    VALIDATED = 4
    """Validation is done, or given up, or was not due."""
    COMMITTED = 5
    """The step is in the journal."""


class StepProgress(agenda.Tracked):
    """The state of the step in progress, except for its groups."""

    def __init__(self, number: int, changed: agenda.Changed, state: StepState = StepState.GENERATING) -> None:
        super().__init__(changed)
        self.number = number
        self.state = state
        self.missing: dict[str, str] = {}
        """Engines that trainers could not fetch samples from, with the reason, until all ranks have said so."""
        self.num_fetches = 0
        """The times that trainers were asked to fetch the step's samples."""
        self.has_update = False
        """Whether the step must have changed the weights."""


class RunSteps(agenda.Tracked):
    """The step in progress, and how far the run is."""

    def __init__(self, first_step: int, changed: agenda.Changed) -> None:
        super().__init__(changed)
        self.progress = StepProgress(first_step - 1, changed, StepState.TRAINED)
        self.has_started = False
        """Whether the weights to start from have reached the engines."""
        self.drawn = first_step - 1
        """The newest step with groups drawn."""
        self.saved = first_step - 1
        """The newest step that trainers have copied, or that the run began with."""
        self.is_interrupted = False

    def begin(self, number: int) -> None:
        """Begin a step."""
        self.progress = StepProgress(number, self._changed)

    def go_back(self) -> None:
        """Go back to the end of the step before, which was done."""
        self.progress = StepProgress(self.progress.number - 1, self._changed, StepState.COMMITTED)
