"""Pending requests, and the phases of a run that they belong to.

A request is a command without an answer, with its own id and deadline. A phase is derived from the scheduler's tables
after an event that may have changed it. It decides nothing: it tells people what the run does, and what a step's time
is spent on.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Iterator

import msgspec

from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.coordinator.scheduler.events import CommandFields


class RunPhase(enum.Enum):
    """The phases of the run as a whole, or of one request. The value completes "while ..."."""

    JOINING = "joining"
    BUILDING = "building"
    PLANNING = "planning transfers"
    INSTALLING = "installing transfer programs"
    CONNECTING = "connecting transfer groups"
    COPYING = "copying weights for engines"
    REFITTING = "refitting"
    VERIFYING = "verifying a weight version"
    GENERATING = "generating"
    TRAINING = "training"
    VALIDATING = "validating"
    SAVING = "saving a checkpoint"
    WRITING = "writing a checkpoint"
    RECORDING = "recording samples"
    FINISHED = "finished"

    __hash__ = object.__hash__  # as members are equal, but in C: each event asks tables for a phase


GENERATION = (RunPhase.GENERATING, RunPhase.VALIDATING)
"""The phases in which engines generate."""
_BREAKDOWN: dict[RunPhase, str] = {
    RunPhase.GENERATING: "generation",
    RunPhase.TRAINING: "training",
    RunPhase.REFITTING: "refit",
    RunPhase.VALIDATING: "validation",
    RunPhase.SAVING: "checkpointing",
}
"""The phases that a step's time is divided into. The trainer's own breakdown of training comes with `Trained`."""


class PhaseStopwatch:
    """The phase of a run, and the seconds that the step in progress has spent in each."""

    def __init__(self, now: float) -> None:
        self.phase = RunPhase.JOINING
        self._phase_since = self._step_since = now
        self._seconds: dict[str, float] = {}

    def enter(self, phase: RunPhase, now: float) -> None:
        """Enter another phase, or stay in this one."""
        if phase is not self.phase:
            self._note(now)
            self.phase = phase

    def begin_step(self, now: float) -> None:
        """Count from now on. The time that the phase has taken so far is not part of the step."""
        self._note(now)
        self._step_since = now
        self._seconds = {}

    def measure_phase(self, now: float) -> float:
        """Return the seconds since the phase began or was last read."""
        return now - self._phase_since

    def read(self, now: float) -> dict[str, float]:
        """Return the seconds of the step by phase, with their ``total``."""
        self._note(now)
        return {**self._seconds, "total": now - self._step_since}

    def _note(self, now: float) -> None:
        """Add the time since the phase began to the step's time, once."""
        name = _BREAKDOWN.get(self.phase)
        if name is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._phase_since
        self._phase_since = now


_SPARE_DEADLINES = 64  # of closed requests


class PendingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command without an answer."""

    command_id: int
    process: str
    phase: RunPhase
    """The phase that it belongs to."""
    deadline: float
    allowed_s: float


class PendingRequests(dict[int, PendingRequest]):
    """The pending requests, by the id of the command: each gets its id and deadline, and is closed when it is answered.

    The owner sets `now`, as it reads no clock.
    """

    def __init__(self, now: float, first_command_id: int = 1, changed: Changed = no_agenda) -> None:
        super().__init__()
        self._changed = changed
        self.now = now
        self._of_process: dict[str, dict[int, PendingRequest]] = {}
        self._num_of_phase: dict[RunPhase, int] = dict.fromkeys(RunPhase, 0)
        self._deadlines: list[tuple[float, int]] = []
        """A heap, which still has answered requests."""
        self.next_command_id = first_command_id
        """The id of the next command. Commands of an earlier attempt have lower ids, so that no late answer is
        mistaken.
        """

    def open(self, process: str, phase: RunPhase, allowed_s: float) -> CommandFields:
        """Open a request to `process`, which belongs to `phase`."""
        fields = self.notice(allowed_s)
        request = PendingRequest(
            command_id=fields["command_id"],
            process=process,
            phase=phase,
            deadline=self.now + allowed_s,
            allowed_s=allowed_s,
        )
        self[request.command_id] = request
        self._of_process.setdefault(process, {})[request.command_id] = request
        self._num_of_phase[phase] += 1
        heapq.heappush(self._deadlines, (request.deadline, request.command_id))
        self._changed()
        return fields

    def notice(self, allowed_s: float) -> CommandFields:
        """Give an id to a command that needs no answer."""
        command_id = self.next_command_id
        self.next_command_id += 1
        return CommandFields(command_id=command_id, deadline_s=allowed_s)

    def close(self, command_id: int) -> PendingRequest | None:
        """Close a request that is answered or given up, and return it; None if it was not pending."""
        request = self.pop(command_id, None)
        if request is not None:
            del self._of_process[request.process][command_id]
            self._num_of_phase[request.phase] -= 1
            self._changed()
            if len(self._deadlines) > 2 * len(self) + _SPARE_DEADLINES:
                self._deadlines = [deadline for deadline in self._deadlines if deadline[1] in self]
                heapq.heapify(self._deadlines)
        return request

    def num_for(self, *phases: RunPhase) -> int:
        """Return the number of pending requests in these phases."""
        num = 0
        for phase in phases:  # each event asks this several times
            num += self._num_of_phase[phase]
        return num

    def of(self, process: str, *phases: RunPhase) -> Iterator[PendingRequest]:
        """Yield the pending requests to `process`, oldest first: all of them, or those in some phases."""
        for request in self._of_process.get(process, {}).values():
            if not phases or request.phase in phases:
                yield request

    def processes(self) -> list[str]:
        """Return the processes with a pending request."""
        return [process for process, requests in self._of_process.items() if requests]

    def drop(self, process: str, *phases: RunPhase) -> None:
        """Drop the requests to `process`: all of them, or those in some phases."""
        self._close_all(list(self.of(process, *phases)))

    def drop_all(self, *phases: RunPhase) -> None:
        """Drop all requests in these phases."""
        self._close_all([request for request in self.values() if request.phase in phases])

    def drop_all_but(self, *phases: RunPhase) -> None:
        """Drop all requests, except those in these phases."""
        self._close_all([request for request in self.values() if request.phase not in phases])

    def overdue(self) -> PendingRequest | None:
        """Return a request that is past its deadline."""
        while self._deadlines and self._deadlines[0][1] not in self:
            heapq.heappop(self._deadlines)
        if self._deadlines and self.now > self._deadlines[0][0]:
            return self[self._deadlines[0][1]]
        return None

    def _close_all(self, requests: Iterable[PendingRequest]) -> None:
        for request in requests:
            self.close(request.command_id)
