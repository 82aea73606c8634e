"""The tables: all that the scheduler knows of a run, and conditions that several rules use.

Decisions are functions of the tables: `scheduler` has the rules in their order, and passes each event to its function.
Nothing here sends a command.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tandem.common.errors import ServiceError
from tandem.common.messages import SampleScored
from tandem.coordinator.scheduler.agenda import Changed, RuleMode, RuleTables, no_agenda
from tandem.coordinator.scheduler.engines.joining import JoiningEngines
from tandem.coordinator.scheduler.engines.processes import CountedReplacements, JoinedProcesses, ProcessFailures
from tandem.coordinator.scheduler.engines.table import EngineStatus, EngineTable
from tandem.coordinator.scheduler.engines.transfers import TransferPlanner
from tandem.coordinator.scheduler.events import CommandFields, FinishRun
from tandem.coordinator.scheduler.groups.assignment import BalancedAssignment, GroupAssignment, PinnedAssignment
from tandem.coordinator.scheduler.groups.table import GroupTable, RestoredGroups
from tandem.coordinator.scheduler.requests import PendingRequests, PhaseStopwatch, RunPhase
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.steps import CheckpointSaving, RolloutRecording, RunSteps, StepProgress, StepState
from tandem.coordinator.scheduler.weights import NewestVersion, RefitServicePresence, VersionState


class StepIdleness:
    """The idle time of the step in progress. The owner says after each event which processes are idle from then on."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._share_of_engines = 0.0
        self._are_trainers_idle = False
        self._engines_s = 0.0
        self._trainers_s = 0.0

    def note(self, now: float, *, share_of_engines: float, are_trainers_idle: bool) -> None:
        """Note the share of engines that are idle from now on, and whether the trainers are."""
        self._add(now)
        self._share_of_engines, self._are_trainers_idle = share_of_engines, are_trainers_idle

    def read(self, now: float) -> dict[str, float]:
        """Return the idle seconds since the last call: of engines, in the mean, and of trainers."""
        self._add(now)
        seconds = {"engine_idle_s": self._engines_s, "trainer_idle_s": self._trainers_s}
        self._engines_s = self._trainers_s = 0.0
        return seconds

    def _add(self, now: float) -> None:
        elapsed, self._since = now - self._since, now
        self._engines_s += elapsed * self._share_of_engines
        self._trainers_s += elapsed * self._are_trainers_idle


IsInformative = Callable[[Sequence[SampleScored]], bool]
"""Whether training can learn something from the results of a group."""


class StreamedGroups:
    """The groups of the step in progress that trainers were given before all were there."""

    def __init__(self) -> None:
        self._step = 0
        self.requests: dict[int, int] = {}
        """The id of the command that made the samples of each, by its number."""

    def begin(self, step: int) -> None:
        """Forget the groups of other steps."""
        if step != self._step:
            self._step, self.requests = step, {}


class SchedulerTables:
    """Groups, engines, processes and pending requests, the step in progress, and how far the run is."""

    def __init__(
        self,
        spec: RunSpec,
        now: float,
        is_informative: IsInformative,
        first_command_id: int,
        changes: Callable[[RuleTables], Changed],
    ) -> None:
        """Take the run's spec, and `RuleAgenda.changes`."""
        self.spec = spec
        self.is_synchronous = spec.is_synchronous
        self.is_informative = is_informative
        self.processes = JoinedProcesses(spec.expected, spec.departed, changes(RuleTables.PROCESSES))
        self.engines_to_begin: list[str] = []
        """The engines that everything is set up with. Others may join later."""
        self.told_to_leave: dict[str, None] = {}
        """Engines that were told to leave before everything was set up, or that stay nevertheless."""
        self.requests = PendingRequests(now, first_command_id, changes(RuleTables.REQUESTS))
        self.groups = GroupTable(
            changes(RuleTables.GROUPS),
            changes(RuleTables.READY),
            no_agenda if spec.max_stored_tokens is None else changes(RuleTables.STORED),
        )
        balance, changed_waiting = spec.balance, changes(RuleTables.WAITING)
        self.assignment: GroupAssignment = (
            PinnedAssignment(changed_waiting)
            if balance is None
            else BalancedAssignment(width=balance.width, timeout_s=balance.timeout_s, changed=changed_waiting)
        )
        self.restored = RestoredGroups({})
        self.engines = EngineTable(spec.departed, changes)
        self.transfers = TransferPlanner(spec, self.requests, self.processes.public_keys)
        self.joining = JoiningEngines(self.requests, self.transfers, changes(RuleTables.JOINING))
        self.weights = NewestVersion(spec, self.requests, self.engines, self.transfers, changes(RuleTables.WEIGHTS))
        self.service = RefitServicePresence(
            spec, self.requests, self.transfers, self.weights.verification, changes(RuleTables.WEIGHTS)
        )
        self.replacements = CountedReplacements(spec.max_replacements, spec.replacement_window_s, spec.replaced_at)
        self.saving = CheckpointSaving(spec, self.requests, changes(RuleTables.SAVING))
        self.recording = RolloutRecording(spec, self.requests, changes(RuleTables.RECORDING))
        self.steps = RunSteps(spec.first_step, changes(RuleTables.STEPS))
        self.watch = PhaseStopwatch(now)
        self.idleness = StepIdleness(now)
        self.stage: RunPhase | None = RunPhase.JOINING
        """The stage of the set-up; None once it is done."""
        self.trainers_meet = False
        """Whether trainers are being built, or have been."""
        self.error: ServiceError | None = None
        """The error of a run that has failed, and now only waits for a checkpoint."""
        self.finish: FinishRun | None = None
        self.unusable: dict[str, int] = {}
        """The times in a row that trainers could not use an engine's samples."""
        self.failures = ProcessFailures()
        self.full: dict[str, None] = {}
        """Engines that have no room to store the samples of waiting groups."""
        self.still_since = math.inf
        """The time since which no request is pending."""
        self.num_too_old = 0
        """Groups dropped since the last step was committed, because their weights were too old."""
        self.streamed = StreamedGroups()
        self.num_in_store = 0
        """Groups that were ready for later steps when the step in progress began to train."""

    @property
    def mode(self) -> RuleMode:
        """The rules in force."""
        if self.finish is not None:
            return RuleMode.OVER
        if self.error is not None:
            return RuleMode.FAILING
        return RuleMode.GOING_ON if self.stage is None else RuleMode.SETTING_UP

    @property
    def is_all_in_time(self) -> bool:
        """Whether a look at the clock changes nothing: requests are pending, none is late, and every process is there.

        True at nearly every tick of a plain run, whose other deadlines are only looked at when this is false.
        """
        is_complete = (
            self.stage is None and not self.engines.num_having(EngineStatus.ABSENT) and not self.service.is_absent
        )
        is_calm = not self.engines.draining and not self.recording.waiting and not self.full
        is_in_time = len(self.requests) > 0 and self.requests.overdue() is None
        return is_complete and is_calm and is_in_time and self.spec.balance is None

    @property
    def progress(self) -> StepProgress:
        """The state of the step in progress."""
        return self.steps.progress

    @property
    def step(self) -> int:
        """The step in progress, or the last one done."""
        return self.steps.progress.number

    @property
    def senders(self) -> list[str]:
        """The trainers that engines get weights from: those that hold the policy."""
        return [name for name in self.processes.of_kind["trainer"] if name not in self.spec.without_policy]

    @property
    def is_last(self) -> bool:
        """Whether no step follows the one in progress."""
        return self.step >= self.spec.last_step

    @property
    def trainers_use_devices(self) -> bool:
        """Whether trainers need memory of GPUs on which engines, as they are built, measure what is free."""
        return self.spec.engines_first and self.requests.num_for(RunPhase.TRAINING, RunPhase.SAVING) > 0

    @property
    def engines_use_devices(self) -> bool:
        """Whether engines are built on GPUs that trainers also use, which wait meanwhile."""
        return self.spec.engines_first and (
            self.engines.num_having(EngineStatus.BUILDING) > 0 or self.joining.is_building
        )

    @property
    def is_service_able(self) -> bool:
        """Whether the refit service can compare digests and plan: it is there, and knows all layouts."""
        return not self.service.is_absent and not self.requests.num_for(RunPhase.PLANNING)

    @property
    def is_refitting(self) -> bool:
        """Whether the step waits for engines to get the version that trainers hold, or for it to be copied."""
        weights = self.weights
        is_held_up = weights.state is VersionState.COPYING or not weights.outlasts_step
        is_read = self.steps.is_interrupted and self.requests.num_for(RunPhase.REFITTING) > 0
        return is_read or (is_held_up and weights.is_transferring)

    @property
    def may_commit(self) -> bool:
        """Whether the step in progress needs only to be saved and committed."""
        state = self.progress.state
        return state is StepState.COMMITTED or (state is StepState.VALIDATED and not self.is_refitting)

    @property
    def newest_step(self) -> int:
        """The newest step that groups may be generated for."""
        return min(self.step + self.spec.max_trajectory_age_steps, self.spec.last_step)

    def oldest_version(self, step: int) -> int:
        """Return the oldest weights that training samples of a step may be made with."""
        return step - 1 - self.spec.max_trajectory_age_steps

    @property
    def must_save(self) -> bool:
        """Whether the step is to be saved, and is not saved yet."""
        every, step = self.spec.save_every, self.step
        is_due = every > 0 and (step % every == 0 or self.is_last or self.steps.is_interrupted)
        return is_due and step > self.steps.saved and self.steps.has_started

    @property
    def phase(self) -> RunPhase:
        """The phase that the run is in, for people."""
        state, saving = self.progress.state, self.saving
        is_to_commit = StepState.TRAINED <= state < StepState.COMMITTED
        if self.finish is not None:
            return RunPhase.FINISHED
        if self.error is not None:
            return RunPhase.WRITING
        if self.stage is not None:
            return self.stage
        if state is StepState.TRAINING:
            return RunPhase.TRAINING
        if not self.steps.has_started or (is_to_commit and self.is_refitting):
            return RunPhase.REFITTING
        if state is StepState.VALIDATING:
            return RunPhase.VALIDATING
        if saving.copied is not None or (is_to_commit and self.must_save):
            return RunPhase.SAVING
        if state is StepState.COMMITTED:
            return RunPhase.WRITING if saving.is_out else RunPhase.VERIFYING
        return RunPhase.GENERATING

    def open(self, process: str, phase: RunPhase, num_batches: int = 1) -> CommandFields:
        """Open a request to a process, with the time that is allowed for this number of batches."""
        deadlines = self.spec.deadlines
        allowed: dict[RunPhase, float] = {
            RunPhase.BUILDING: deadlines.build,
            RunPhase.GENERATING: deadlines.generate,
            RunPhase.TRAINING: deadlines.train,
            RunPhase.VALIDATING: deadlines.generate if self.spec.has_engines else deadlines.evaluate,
        }
        return self.requests.open(process, phase, num_batches * allowed[phase])

    def abandon_step(self) -> None:
        """Go back to the last finished step, and save it if it was not saved."""
        self.groups.remove(self.step, "train")
        self.steps.go_back()

    def stop_generating(self) -> None:
        """Forget what was to be generated, and ask nothing more of engines, because the run ends."""
        self.groups.clear()
        self.assignment.clear()
        self.joining.stop()
        self.weights.stop()
