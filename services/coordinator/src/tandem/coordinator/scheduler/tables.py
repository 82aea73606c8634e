"""The tables: all that the scheduler knows of a run, and conditions that several rules read off them.

Who decides is a function of the tables: `rules` has the rules in their order, `scheduler` gives each event to whom it
concerns. Nothing here orders anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tandem.common.errors import ServiceError
from tandem.common.messages import Purpose, SampleScored
from tandem.coordinator.scheduler.assignment import assignment_for
from tandem.coordinator.scheduler.events import Finish
from tandem.coordinator.scheduler.groups import GroupTable
from tandem.coordinator.scheduler.idleness import Idleness
from tandem.coordinator.scheduler.kept import KeptGroups
from tandem.coordinator.scheduler.membership import Membership
from tandem.coordinator.scheduler.phases import Phase, Stopwatch
from tandem.coordinator.scheduler.publication import Publication
from tandem.coordinator.scheduler.recording import Recording
from tandem.coordinator.scheduler.replacements import Failures
from tandem.coordinator.scheduler.requests import CommandFields, PendingRequests
from tandem.coordinator.scheduler.saving import Saving
from tandem.coordinator.scheduler.spec import RunSpec

IsInformative = Callable[[Sequence[SampleScored]], bool]
"""Whether training can learn something from the results of a group."""


class StepProgress:
    """How far the step in progress is; all but its groups."""

    def __init__(self, number: int, *, is_trained: bool = False, is_committed: bool = False) -> None:
        self.number = number
        self.is_training = False
        self.missing: dict[str, str] = {}
        """Engines whose samples trainers could not fetch, and why; while ranks are still to say so."""
        self.num_fetches = 0
        """How often trainers were to fetch the step's samples."""
        self.is_trained = is_trained
        """Whether the optimizer has stepped; the weights that a run starts with count as a trained step."""
        self.has_update = False
        """Whether that must have changed the weights."""
        self.is_validating = False
        """Whether validation has begun, and is not done."""
        self.is_validated = False
        """Whether it is done, or given up."""
        self.is_committed = is_committed
        """Whether the step is in the journal."""


class Tables:
    """Groups, engines, processes and pending requests, the step in progress, and how far the run is."""

    def __init__(self, spec: RunSpec, now: float, is_informative: IsInformative, first_command_id: int) -> None:
        self.spec = spec
        self.is_informative = is_informative
        self.members = Membership(spec.expected, spec.departed)
        self.engines_to_begin: list[str] = []
        """Those that everything is set up with; others may join later."""
        self.told_to_leave: dict[str, None] = {}
        """Engines that were, before everything was set up, or who stay nevertheless."""
        self.requests = PendingRequests(now, first_command_id)
        self.groups = GroupTable()
        self.assignment = assignment_for(spec.balance)
        self.kept = KeptGroups({})
        self.publication = Publication(spec, self.requests)
        self.saving = Saving(spec, self.requests)
        self.recording = Recording(spec, self.requests)
        self.progress = StepProgress(spec.first_step - 1, is_trained=True)
        self.watch = Stopwatch(now)
        self.idleness = Idleness(now)
        self.stage: Phase | None = Phase.JOINING
        """How far everything is set up; None once it is."""
        self.trainers_meet = False
        """Whether trainers are being built, or have been."""
        self.has_started = False
        """Whether the weights to start from have reached the engines."""
        self.drawn = spec.first_step - 1
        """The newest step whose groups were drawn."""
        self.saved = spec.first_step - 1
        """The newest step of which trainers have a copy, or the run began with one."""
        self.is_interrupted = False
        self.error: ServiceError | None = None
        """Why the run has failed, while it only waits for a checkpoint."""
        self.finish: Finish | None = None
        self.unusable: dict[str, int] = {}
        """Engines whose samples trainers could not use, and how often in a row."""
        self.failures = Failures()
        self.full: dict[str, None] = {}
        """Engines whose stores of samples have no room for what waits."""
        self.still_since = math.inf
        """Since when nobody has been asked for anything."""
        self.num_too_old = 0
        """Groups that were dropped since the last step was committed, because what made them was too old."""
        self.num_in_store = 0
        """Groups that were ready for later steps when the step in progress began to train."""

    @property
    def step(self) -> int:
        """The step in progress, or the last one done."""
        return self.progress.number

    @property
    def senders(self) -> list[str]:
        """The trainers whose weights engines get: those that hold the policy."""
        return [name for name in self.members.all("trainer") if name not in self.spec.without_policy]

    @property
    def is_last(self) -> bool:
        """Whether no step follows the one in progress."""
        return self.step >= self.spec.last_step

    @property
    def is_refitting(self) -> bool:
        """Whether the step waits for engines to get the version that trainers hold, or for it to be copied."""
        return self.publication.holds_up_step or (self.is_interrupted and self.requests.num_for(Phase.REFITTING) > 0)

    @property
    def may_commit(self) -> bool:
        """Whether nothing is left of the step in progress but to save and commit it."""
        progress = self.progress
        return progress.is_trained and (progress.is_committed or (progress.is_validated and not self.is_refitting))

    @property
    def must_save(self) -> bool:
        """Whether the step is to be saved, and was not."""
        every, step = self.spec.save_every, self.step
        is_due = every > 0 and (step % every == 0 or self.is_last or self.is_interrupted)
        return is_due and step > self.saved and self.has_started

    @property
    def phase(self) -> Phase:
        """What the run is doing, for people."""
        progress, saving = self.progress, self.saving
        if self.finish is not None:
            return Phase.FINISHED
        if self.error is not None:
            return Phase.WRITING
        if self.stage is not None:
            return self.stage
        if progress.is_training:
            return Phase.TRAINING
        if not self.has_started or (progress.is_trained and not progress.is_committed and self.is_refitting):
            return Phase.REFITTING
        if progress.is_validating:
            return Phase.VALIDATING
        if saving.is_copied or (progress.is_trained and not progress.is_committed and self.must_save):
            return Phase.SAVING
        if progress.is_committed:
            return Phase.WRITING if saving.is_out else Phase.ATTESTING
        return Phase.GENERATING

    def is_free(self, engine: str) -> bool:
        """Tell whether the weights of an engine may change: it has nothing in flight, or what can go on with others."""
        fixed: tuple[Purpose, ...] = ("validate",) if self.spec.updates_in_flight else ()
        return not self.groups.num_in_flight(engine, *fixed)

    def open(self, member: str, phase: Phase, num_batches: int = 1) -> CommandFields:
        """Open a request to a member, which may take as long as is allowed for so many batches."""
        deadlines = self.spec.deadlines
        allowed: dict[Phase, float] = {
            Phase.BUILDING: deadlines.build,
            Phase.GENERATING: deadlines.generate,
            Phase.TRAINING: deadlines.train,
            Phase.VALIDATING: deadlines.generate if self.spec.has_engines else deadlines.evaluate,
        }
        return self.requests.open(member, phase, num_batches * allowed[phase])

    def abandon_step(self) -> None:
        """Go back to the last step that was done, and save it if it was not saved."""
        self.groups.remove(self.step, "train")
        self.progress = StepProgress(self.step - 1, is_trained=True, is_committed=True)

    def stop_generating(self) -> None:
        """Forget what was to be generated, and ask nothing more of engines: the run ends."""
        self.groups.clear()
        self.assignment.clear()
        self.publication.stop()
