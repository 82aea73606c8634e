"""Logging of rollouts: the samples of finished steps on their way to the rollout log, by rollout.

A part is best written by the rollout that made its samples. These are on disk since they finished, so that another
rollout can write the part if that one is lost. Only two things wait for the log: a checkpoint is not published before
the log has its steps, and the run does not end before the log is whole. A part that cannot be written, or takes too
long, is given up with a notice, and the run goes on.
"""

from __future__ import annotations

import msgspec

from tandem.common.messages import Purpose, SamplesRecorded
from tandem.coordinator.scheduler.agenda import Changed
from tandem.coordinator.scheduler.events import Action, DispatchRecord, StepRecorded, TellUser
from tandem.coordinator.scheduler.phases import RunPhase
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec


class RolloutPart(msgspec.Struct, frozen=True):
    """The samples that a step had of one rollout."""

    step: int
    purpose: Purpose
    rollout: str


class RolloutRecording:
    """Parts of the rollout log that are not written yet. Does nothing if no log is kept."""

    def __init__(self, spec: RunSpec, requests: PendingRequests, changed: Changed) -> None:
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
        return any(part.rollout == rollout for part in parts) or any(self._requests.of(rollout, RunPhase.RECORDING))

    def begin(self, step: int, purpose: Purpose, rollouts: set[str]) -> bool:
        """Log all samples that a step had of these rollouts, for training or validation.

        Return whether they will be logged.
        """
        if self._is_on and rollouts:
            until = self._requests.now + self._allowed_s
            self.waiting |= {RolloutPart(step, purpose, rollout): until for rollout in sorted(rollouts)}
            self._num_left[step, purpose] = len(rollouts)
            self._num_bytes[step, purpose], self._rollouts[step, purpose] = 0, []
            self._changed()
        return self._is_on and bool(rollouts)

    def run_rule(self) -> list[Action] | None:
        """Ask rollouts to write the parts that wait; None if none waits, or there is no rollout to ask."""
        actions: list[Action] = []
        for part in [*self.waiting] if self._able else []:
            process = part.rollout if part.rollout in self._able else next(iter(self._able))
            fields = self._requests.open(process, RunPhase.RECORDING, self._allowed_s)
            del self.waiting[part]
            self._asked[fields["command_id"]] = part
            of_part = msgspec.structs.asdict(part)
            actions.append(DispatchRecord(process=process, **of_part, **fields))
            self._changed()
        return actions or None

    def take_built(self, rollout: str) -> None:
        """Note that a rollout can be asked."""
        self._able[rollout] = None
        self._changed()

    def take_loss(self, rollout: str) -> None:
        """Note that a rollout is lost. The parts that it was asked for wait again."""
        self._able.pop(rollout, None)
        for request in [*self._requests.of(rollout, RunPhase.RECORDING)]:
            self._requests.close(request.command_id)
            self.waiting[self._asked.pop(request.command_id)] = request.deadline
        self._changed()

    def take_recorded(self, reply: SamplesRecorded) -> list[Action]:
        """Note that a part is written. With the last one, its step is whole."""
        part = self._asked.pop(reply.command_id)
        missing = f"{reply.num_missing} samples of {part.rollout} were not written when they finished"
        notices = self._say(part, missing) if reply.num_missing else []
        self._rollouts[part.step, part.purpose].append(part.rollout)
        return [*notices, *self._close(part, reply.num_bytes)]

    def take_failure(self, command_id: int, reason: str) -> list[Action]:
        """Give up a part that could not be written."""
        part = self._asked.pop(command_id)
        return [*self._say(part, f"those of {part.rollout}: {reason}"), *self._close(part)]

    def give_up_late(self) -> list[Action]:
        """Give up the parts that have waited too long for a rollout."""
        late = [part for part, until in self.waiting.items() if self._requests.now > until]
        actions: list[Action] = []
        for part in late:
            del self.waiting[part]
            actions += [*self._say(part, f"those of {part.rollout}: no rollout is there"), *self._close(part)]
        return actions

    def _close(self, part: RolloutPart, num_bytes: int = 0) -> list[Action]:
        key = part.step, part.purpose
        self._num_bytes[key] += num_bytes
        self._num_left[key] -= 1
        self._changed()
        if self._num_left[key]:
            return []
        del self._num_left[key]
        rollouts, num_bytes = self._rollouts.pop(key), self._num_bytes.pop(key)
        recorded = StepRecorded(step=part.step, purpose=part.purpose, rollouts=tuple(rollouts), num_bytes=num_bytes)
        return [recorded]

    def _say(self, part: RolloutPart, gap: str) -> list[Action]:
        """Report what the rollout log lacks, once for each reason."""
        if gap in self._said:
            return []
        self._said.add(gap)
        kind = "samples" if part.purpose == "train" else "validation samples"
        return [TellUser(text=f"{kind} of step {part.step} are missing in the record: {gap}")]
