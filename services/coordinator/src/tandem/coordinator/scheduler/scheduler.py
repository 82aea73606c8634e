"""The coordinator's decisions: an event changes the tables, and rules run until none fires. Pure.

`Scheduler.handle` takes one event and returns the actions it leads to: it applies the event to the tables, and then
runs the rules until none fires. It opens no socket, reads no clock (every event carries ``now``), touches no file and
knows no arrays, so that a whole run, with every failure in it, is tested as a list of events and actions.
`tandem.coordinator.run.run.loop` carries the actions out.

The tables: rollout groups (`groups`), engines (`engines`), pending requests (`requests`), and the step in progress.

| rule | fires when | and then |
|---|---|---|
| set up | everybody has done what the stage before asked for | build, plan, install, connect |
| publish | trainers hold a version that an engine lacks, and it may take it | refit it, attest it, record |
| validate | a step has trained, it is due, and engines hold the new version | groups, or a batch, to evaluate |
| save | it is due, and no checkpoint is being written | copy; write beside what follows |
| record | a step has trained | rollouts write its samples to the record, beside what follows |
| publish it | a checkpoint is written, and the record has its steps | it gets its name |
| commit | trained, validated, copied | the step is in the journal |
| advance | the step in progress is committed | the next one begins |
| draw | a step is at most `max_trajectory_age_steps` ahead of the one in progress | its groups wait |
| assign | an engine that holds a version young enough for a waiting group has room | it generates, or restores |
| train | the step's groups are ready, every version in them is attested, nobody reads weights | every rank trains |
| offer | every rank has trained, nobody reads the version before, it is attested | trainers hold, or copy, a new one |
| finish | the last step is committed, and nothing is pending | the run ends |

Synchronous training is an age of zero: nothing is generated for a step before the weights of the one before are
published. An algorithm over a data set has no engines, and the rules that need them do not fire.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, assert_never

from tandem.common.errors import CommandFailed, DeadlineExceeded, SamplingExhausted, ServiceError, ServiceLost
from tandem.common.messages import (
    BuildTrainer,
    CheckpointSaved,
    EngineBuilt,
    Failed,
    OpenRendezvous,
    Purpose,
    RendezvousOpened,
    Reply,
    RestoreSamples,
    SampleScored,
    SamplesFinished,
    SamplesMissing,
    SamplesRecorded,
    Trained,
)
from tandem.coordinator.scheduler.assignment import Assignment, BalancedAssignment, PinnedAssignment
from tandem.coordinator.scheduler.engines import Status
from tandem.coordinator.scheduler.events import (
    Action,
    CommitStep,
    DiscardSamples,
    Dispatch,
    DispatchBatch,
    DispatchPrompts,
    DrawPrompts,
    DropKept,
    Erred,
    Event,
    Finish,
    Interrupted,
    Joined,
    Lost,
    PromptsDrawn,
    Replied,
    Say,
    StepValidated,
    Ticked,
)
from tandem.coordinator.scheduler.groups import Group, GroupState, GroupTable, StepGroups
from tandem.coordinator.scheduler.idleness import Idleness
from tandem.coordinator.scheduler.kept import KeptGroup, KeptGroups, Place
from tandem.coordinator.scheduler.membership import Membership
from tandem.coordinator.scheduler.phases import Phase, Stopwatch
from tandem.coordinator.scheduler.publication import Publication
from tandem.coordinator.scheduler.recording import Recording
from tandem.coordinator.scheduler.requests import CommandFields, PendingRequests
from tandem.coordinator.scheduler.saving import Saving
from tandem.coordinator.scheduler.spec import RunSpec

IsInformative = Callable[[Sequence[SampleScored]], bool]
"""Whether training can learn something from the results of a group."""
_GENERATION = (Phase.GENERATING, Phase.VALIDATING)
_STANDSTILL_S = 10.0
"""How long nobody may be asked for anything before the run fails."""
_MAX_FETCHES = 3
"""How often trainers may try to fetch the samples of a step."""


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


class Scheduler:
    """Decides who generates what for whom, when to train, and when weights move."""

    def __init__(
        self,
        spec: RunSpec,
        now: float,
        is_informative: IsInformative = bool,
        kept: Mapping[Place, KeptGroup] = {},
    ) -> None:
        """`is_informative` says whether a group is worth training on, where the run samples dynamically.

        `kept` are groups that were generated before the run was resumed.
        """
        self.spec = spec
        self.requests = PendingRequests(now)
        self.groups = GroupTable()
        self.publication = Publication(spec, self.requests)
        self.progress = StepProgress(spec.first_step - 1, is_trained=True)
        self._is_informative = is_informative
        self._membership = Membership(spec.expected)
        self._assignment = _make_assignment(spec)
        self._saving = Saving(spec, self.requests)
        self._recording = Recording(spec, self.requests)
        self._kept = KeptGroups(kept)
        self._watch = Stopwatch(now)
        self._stage: Phase | None = Phase.JOINING
        """How far everything is set up; None once it is."""
        self._has_started = False
        """Whether the weights to start from have reached the engines."""
        self._drawn = spec.first_step - 1
        """The newest step whose groups were drawn."""
        self._saved = spec.first_step - 1
        """The newest step of which trainers have a copy, or the run began with one."""
        self._is_interrupted = False
        self._error: ServiceError | None = None
        """Why the run has failed, while it only waits for a checkpoint."""
        self._finish: Finish | None = None
        self._full: dict[str, None] = {}
        """Engines whose stores of samples have no room for what waits."""
        self._idleness = Idleness(now)
        self._still_since = math.inf
        """Since when nobody has been asked for anything."""
        self._num_too_old = 0
        """Groups that were dropped since the last step was committed, because what made them was too old."""
        self._num_in_store = 0
        """Groups that were ready for later steps when the step in progress began to train."""

    @property
    def step(self) -> int:
        """The step in progress, or the last one done."""
        return self.progress.number

    @property
    def phase(self) -> Phase:
        """What the run is doing, for people."""
        progress, saving = self.progress, self._saving
        if self._finish is not None:
            return Phase.FINISHED
        if self._error is not None:
            return Phase.WRITING
        if self._stage is not None:
            return self._stage
        if progress.is_training:
            return Phase.TRAINING
        if not self._has_started or (progress.is_trained and not progress.is_committed and self._is_refitting()):
            return Phase.REFITTING
        if progress.is_validating:
            return Phase.VALIDATING
        if saving.is_copied or (progress.is_trained and not progress.is_committed and self._must_save()):
            return Phase.SAVING
        if progress.is_committed:
            return Phase.WRITING if saving.is_out else Phase.ATTESTING
        return Phase.GENERATING

    @property
    def missing(self) -> str:
        """The processes that are yet to join, for people; empty once all have."""
        return self._membership.missing()

    def handle(self, event: Event) -> list[Action]:
        """Take one event; return the actions it leads to, in order."""
        self.requests.now = event.now
        if self._finish is not None:
            return []
        try:
            actions = self._apply(event)
            while fired := self._run_rules():
                actions += fired
        except ServiceError as error:
            actions = self._fail(error)
        self._watch.enter(self.phase, event.now)
        self._note_idleness(event.now)
        return actions

    # --- events ------------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> list[Action]:
        match event:
            case Joined(member=member, kind=kind):
                self._membership.add(member, kind)
                is_wanted = member in self.publication.engines and self._error is None
                return self.publication.take_replacement(member) if is_wanted else []
            case Replied(member=member, reply=reply):
                return self._apply_reply(member, reply)
            case Erred(member=member, failed=failed):
                return self._apply_failure(member, failed)
            case Lost(member=member, why=why):
                return self._apply_loss(member, why)
            case PromptsDrawn(step=step, purpose=purpose, sizes=sizes):
                groups = self.groups.add(step, purpose, sizes)
                self._assignment.add(groups, self.publication.engines.names())
                return []
            case Ticked():
                given_up = self._check_deadlines()
                return [*given_up, *self._move_from_slow_engines()]
            case Interrupted():
                return self._interrupt()
            case other:
                assert_never(other)

    def _apply_reply(self, member: str, reply: Reply) -> list[Action]:
        if reply.command_id not in self.requests:
            return []  # a repetition, or the answer to an order that was given up
        if isinstance(reply, SamplesFinished):  # a part of an answer
            news = self.groups.take_results(member, reply)
            for group, num_samples in news:
                self._assignment.finished(member, group, num_samples)
            return self._drop_too_old([group for group, _ in news if group.state is GroupState.READY])
        self.requests.close(reply.command_id)
        self.groups.close_request(reply.command_id)
        if isinstance(reply, SamplesMissing):
            self.progress.missing |= reply.members
        if isinstance(reply, Trained):
            self.progress.has_update |= reply.has_update
        if isinstance(reply, CheckpointSaved):
            self._saving.take_written(member)
            return []
        if isinstance(reply, SamplesRecorded):
            return self._recording.take_recorded(reply)
        if isinstance(reply, EngineBuilt):
            self._recording.take_built(member)
        actions = self.publication.take_reply(member, reply)
        return self._build_trainers(reply) if isinstance(reply, RendezvousOpened) else actions

    def _apply_failure(self, member: str, failed: Failed) -> list[Action]:
        request = self.requests.close(failed.command_id)
        if request is None:
            return []
        if request.phase is Phase.RECORDING:
            return self._recording.take_failure(failed.command_id, failed.error)
        if self._kept.is_restored(failed.command_id):
            return self._make_instead(member, failed)
        is_engine = self._membership.kind(member) == "rollout"
        if request.phase is Phase.REFITTING or (request.phase is Phase.ATTESTING and is_engine):
            self.publication.take_failure(member, failed, request.phase)
            return []
        if request.phase is Phase.WRITING:
            self._saving.give_up()
        raise CommandFailed(member, failed.phase, failed.account)

    def _apply_loss(self, member: str, why: str) -> list[Action]:
        """Replace an engine that is lost; the run cannot go on without any other process."""
        self._recording.take_loss(member)
        if self._saving.is_awaited_from(member):
            self._saving.give_up()
        elif self._error is not None:
            return []
        if self._is_interrupted and self._membership.kind(member) == "rollout":
            self.requests.drop(member)
            return []
        if member not in self.publication.engines:
            raise ServiceLost(member, self.phase.value, why)
        self._drop_generation(member)
        self.groups.forget_stored(member)
        return self.publication.take_loss(member, self.phase.value, why)

    # --- rules -------------------------------------------------------------------------------------------------------

    def _run_rules(self) -> list[Action]:
        """Run every rule once, in order; return what they lead to."""
        if self._finish is not None:
            return []
        if self._error is not None:
            return self._rule_publish() or self._rule_finish()
        if self._stage is not None:
            return self._rule_set_up()
        actions = self.publication.run_rules(self._is_free) + self._put_back_suspects() + self._recording.run_rule()
        for rule in (
            self._rule_start,
            self._rule_offer,
            self._rule_validate,
            self._rule_publish,
            self._rule_save,
            self._rule_commit,
            self._rule_advance,
            self._rule_draw,
            self._rule_assign,
            self._rule_train,
            self._rule_finish,
        ):
            if fired := rule():
                return actions + fired
        return actions

    def _rule_set_up(self) -> list[Action]:
        """Go on once everybody has done what the stage asks for."""
        stage = self._stage
        assert stage is not None, "asked only while there is a stage"
        if self.requests.num_for(stage) or not self._membership.is_complete:
            return []
        trainers, engines = self._membership.all("trainer"), self._membership.all("rollout")
        match stage:
            case Phase.JOINING:
                self._stage = Phase.BUILDING
                meet = OpenRendezvous(**self._open("trainer-0", Phase.BUILDING))
                return [
                    Dispatch(member="trainer-0", order=meet),
                    *[self.publication.transfers.order_build(engine) for engine in engines],
                ]
            case Phase.BUILDING if self.spec.has_engines:
                self._stage = Phase.PLANNING
                return self.publication.transfers.order_plan(trainers, engines)
            case Phase.PLANNING:
                self._stage = Phase.INSTALLING
                return self.publication.transfers.order_install()
            case Phase.INSTALLING:
                self._stage = Phase.CONNECTING
                meshes = self.publication.transfers.plan.meshes
                orders = [o for mesh in meshes for o in self.publication.transfers.order_connect(mesh)]
                return [*orders] or self._rule_set_up()
            case _:
                self._stage = None
                actions = self.publication.begin(trainers, engines)
                actions += self.publication.offer(self.step, has_update=False)
                return actions + self._run_rules()

    def _rule_start(self) -> list[Action]:
        """Begin with the first step: everybody holds the weights to start from, which are validated if asked for."""
        if self._has_started or self._is_refitting() or self.publication.is_transferring:
            return []
        self._has_started = True
        self._watch.begin_step(self.requests.now)  # what came before was no step
        is_validated = self.spec.validate_at_start and self.step == 0 and not self._is_interrupted
        self.progress.is_committed = not is_validated
        return self._run_rules()

    def _rule_offer(self) -> list[Action]:
        """Take the step as trained once every rank has said so; engines may have the weights."""
        progress = self.progress
        if not progress.is_training or self.requests.num_for(Phase.TRAINING):
            return []
        if progress.missing:
            return self._make_again()
        if not self.publication.may_offer:  # which goes on beside the step
            return []
        progress.is_training, progress.is_trained = False, True
        of_step = self.groups.of_step(progress.number, "train")
        if of_step is not None:
            self._recording.begin(progress.number, "train", {str(group.engine) for group in of_step.groups})
        actions: list[Action] = []
        if self.spec.has_engines and not self._is_interrupted:
            actions = self.publication.offer(progress.number, has_update=progress.has_update)
        return actions + self._run_rules()

    def _rule_validate(self) -> list[Action]:
        """Validate a step that has trained, once engines hold its weights; see when that is done."""
        progress = self.progress
        if not self._has_started or not progress.is_trained or progress.is_committed or progress.is_validated:
            return []
        if self._is_refitting():
            return []
        if not progress.is_validating:
            every, at_start = self.spec.validate_every, progress.number == 0
            is_due = at_start or (every > 0 and (progress.number % every == 0 or self._is_last()))
            progress.is_validating = is_due and not self._is_interrupted
            progress.is_validated = not progress.is_validating
            if not progress.is_validating:
                return self._run_rules()
            if not self.spec.has_engines:
                return self._dispatch_batches("validate")
            return self._draw("validate", progress.number, self.spec.num_validation_groups)
        if not self._is_evaluated():
            return []
        actions: list[Action] = []
        if self.spec.has_engines:
            self.groups.take(self.step, "validate")
            actions = self._record_validation()
        progress.is_validating, progress.is_validated = False, True
        return actions + self._run_rules()

    def _record_validation(self) -> list[Action]:
        """Have the samples recorded that the step was validated by."""
        of_step = self.groups.of_step(self.step, "validate")
        records = () if of_step is None else tuple(of_step.records())
        if not self._recording.begin(self.step, "validate", {record.rollout for record in records}):
            return []
        return [StepValidated(step=self.step, records=records)]

    def _rule_save(self) -> list[Action]:
        """Have trainers copy what is to be saved; then have them write it, beside what follows."""
        if self._saving.is_copied:
            if self.requests.num_for(Phase.SAVING):
                return []
            return self._saving.write(self._membership.all("trainer"))
        if not self._may_commit() or not self._must_save() or self._saving.is_out:
            return []
        self._saved = self.step
        return self._saving.copy(self.step, self._membership.all("trainer"))

    def _rule_publish(self) -> list[Action]:
        """Publish the checkpoint that is written, once the record has all steps that it is made of."""
        step = self._saving.whole
        if step is None or (self._error is None and self._recording.is_pending(step)):
            return []
        return self._saving.publish()

    def _rule_commit(self) -> list[Action]:
        """Have the step written to the journal: now it is done."""
        if self.progress.is_committed or not self._may_commit() or self._must_save() or self._saving.is_copied:
            return []
        self.progress.is_committed = True
        validated = self.groups.of_step(self.step, "validate")
        commit = CommitStep(
            step=self.step,
            version=self.step,
            seconds=self._watch.read(self.requests.now),
            validated=() if validated is None else tuple(record.scored for record in validated.records()),
            metrics={} if self.spec.is_synchronous else self._read_metrics(),
        )
        self.groups.remove(self.step, "train")
        self.groups.remove(self.step, "validate")
        self._kept.forget(self.step)
        return [commit]

    def _rule_advance(self) -> list[Action]:
        """Begin the next step."""
        if not self._has_started or not self.progress.is_committed or self._is_interrupted or self._is_last():
            return []
        self.progress = StepProgress(self.step + 1)
        self._watch.begin_step(self.requests.now)
        return self._run_rules()

    def _rule_draw(self) -> list[Action]:
        """Draw the groups of the next step that may be generated for; or more, where too few are informative."""
        if not self._has_started or not self.spec.has_engines or self._is_interrupted:
            return []
        dynamic = self.spec.dynamic_sampling
        num_groups = self.spec.num_groups if dynamic is None else dynamic.num_groups
        if self._drawn < min(self.step + self.spec.max_trajectory_age_steps, self.spec.last_step):
            self._drawn += 1
            return self._draw("train", self._drawn, num_groups)
        of_step = self.groups.of_step(self.step, "train")
        if of_step is None or not self._is_complete(of_step):
            return []
        return self._draw("train", self.step, num_groups) if self._lacks_groups(of_step) else []

    def _rule_assign(self) -> list[Action]:
        """Have engines generate what waits, as far as they hold weights that are young enough, and have room."""
        full: dict[str, None] = {}
        chosen: dict[str, int] = {}

        def can_generate(engine: str, group: Group) -> bool:
            if not self._can_generate(engine, group):
                return False
            if group.purpose == "train" and not self._has_room(engine, group, chosen.get(engine, 0)):
                full[engine] = None
                return False
            chosen[engine] = chosen.get(engine, 0) + group.size.num_samples * group.size.num_tokens
            return True

        chosen_groups = self._assignment.choose(can_generate, self.requests.now)
        actions = self._say_who_is_full(full)
        dropped = self._drop_kept([group for groups in chosen_groups.values() for group in groups])
        for engine, groups in chosen_groups.items():
            while groups:
                first = groups[0]
                together = [g for g in groups if (g.step, g.purpose) == (first.step, first.purpose)]
                groups = [g for g in groups if g not in together]
                actions += self._dispatch_groups(engine, together)
        return [*dropped, *actions]

    def _rule_train(self) -> list[Action]:
        """Train on the step's groups."""
        if not self._has_started or self.progress.is_training or self.progress.is_trained or self._is_interrupted:
            return []
        if self.spec.has_engines:
            of_step = self.groups.of_step(self.step, "train")
            if of_step is None or not self.publication.may_step:
                return []
            if not self._is_complete(of_step) or self._lacks_groups(of_step):
                return []
            self.groups.take(self.step, "train")
            self._num_in_store = self.groups.num_ready_after(self.step)
        self.progress.is_training = True
        self.progress.num_fetches += 1
        self.publication.withdraw()
        return self._dispatch_batches("train")

    def _rule_finish(self) -> list[Action]:
        """End the run once nothing is pending: a last version to attest, or a checkpoint to write."""
        if self._error is not None:
            return [] if self._saving.is_out else self._end("failed", self._error)
        is_over = self._has_started and self.progress.is_committed and (self._is_interrupted or self._is_last())
        is_recorded = not self._recording.is_pending(self.step)
        if not is_over or not is_recorded or len(self.requests) or not self.publication.is_settled:
            return []
        return self._end("interrupted" if self._is_interrupted else "finished")

    # --- conditions --------------------------------------------------------------------------------------------------

    def _is_last(self) -> bool:
        return self.step >= self.spec.last_step

    def _is_refitting(self) -> bool:
        """Tell whether the step waits for engines to get the version that trainers hold, or for it to be copied."""
        return self.publication.holds_up_step or (self._is_interrupted and self.requests.num_for(Phase.REFITTING) > 0)

    def _may_commit(self) -> bool:
        """Tell whether nothing is left of the step in progress but to save and commit it."""
        return self.progress.is_trained and (
            self.progress.is_committed or (self.progress.is_validated and not self._is_refitting())
        )

    def _must_save(self) -> bool:
        """Tell whether the step is to be saved, and was not."""
        every, step = self.spec.save_every, self.step
        is_due = every > 0 and (step % every == 0 or self._is_last() or self._is_interrupted)
        return is_due and step > self._saved and self._has_started

    def _is_complete(self, of_step: StepGroups) -> bool:
        """Tell whether all groups that were drawn are ready, and every version in them is attested."""
        return of_step.is_ready and all(itertools.starmap(self.publication.is_proven, of_step.newest_versions.items()))

    def _is_stuck(self) -> bool:
        """Tell whether nothing is going on that could make room."""
        progress, engines = self.progress, self.publication.engines
        is_trained_on = progress.is_training or progress.is_trained
        return (
            not is_trained_on
            and not self.requests.num_for(Phase.GENERATING)
            and self.publication.is_settled
            and engines.num_having(Status.HOLDING) == len(engines) > 0
        )

    def _is_evaluated(self) -> bool:
        if not self.spec.has_engines:
            return not self.requests.num_for(Phase.VALIDATING)
        of_step = self.groups.of_step(self.step, "validate")
        assert of_step is not None, "drawn when validation began"
        return self._is_complete(of_step)

    def _lacks_groups(self, of_step: StepGroups) -> bool:
        """Tell whether too few groups of a step are informative. Raises `SamplingExhausted` if it must not go on."""
        dynamic = self.spec.dynamic_sampling
        if dynamic is None:
            return False
        found = sum(self._is_informative([record.scored for record in group.records()]) for group in of_step.groups)
        if found >= self.spec.num_groups:
            return False
        if of_step.num_batches == dynamic.max_batches:
            raise SamplingExhausted(
                "coordinator",
                Phase.GENERATING.value,
                f"the samples of {dynamic.max_batches} x {dynamic.num_groups} prompts have given {found} groups whose "
                f"rewards differ, and a step needs {self.spec.num_groups}: the problems are too easy or too hard, or "
                "grpo.dynamic_sampling_max_gen_batches too low",
            )
        return True

    def _has_room(self, engine: str, group: Group, num_chosen: int) -> bool:
        """Tell whether a rollout can keep the samples of one more group until they are trained on."""
        most, num_tokens = self.spec.max_stored_tokens, group.size.num_samples * group.size.num_tokens
        return most is None or self.groups.num_tokens(engine) + num_chosen + num_tokens <= most

    def _is_free(self, engine: str) -> bool:
        """Tell whether the weights of an engine may change: it has nothing in flight, or what can go on with others."""
        fixed: tuple[Purpose, ...] = ("validate",) if self.spec.updates_in_flight else ()
        return not self.groups.num_in_flight(engine, *fixed)

    def _can_generate(self, engine: str, group: Group) -> bool:
        """Tell whether an engine holds weights young enough for a group; to validate, those of the step itself."""
        if group.purpose == "validate":
            return self.publication.can_generate(engine, group.step, group.step)
        return self.publication.can_generate(engine, self._oldest_version(group.step), group.step - 1)

    def _oldest_version(self, step: int) -> int:
        """Return the oldest weights that samples to train on in a step may be made with."""
        return step - 1 - self.spec.max_trajectory_age_steps

    def _note_idleness(self, now: float) -> None:
        num_engines, has_started = len(self.publication.engines), self._has_started
        busy = self.requests.num_for(Phase.TRAINING, Phase.SAVING, Phase.COPYING)
        self._idleness.note(
            now,
            share_of_engines=has_started * (1 - self.groups.num_generating / max(num_engines, 1)),
            are_trainers_idle=has_started and not busy,
        )

    def _read_metrics(self) -> dict[str, float]:
        num_too_old, self._num_too_old = self._num_too_old, 0
        return {
            **self._idleness.read(self.requests.now),
            "buffer_size": float(self._num_in_store),
            "groups_too_old": float(num_too_old),
        }

    # --- what rules do -----------------------------------------------------------------------------------------------

    def _build_trainers(self, opened: RendezvousOpened) -> list[Action]:
        ranks = self._membership.all("trainer")
        return [
            Dispatch(
                member=rank,
                order=BuildTrainer(
                    rendezvous_host=opened.host,
                    rendezvous_port=opened.port,
                    world_size=len(ranks),
                    version=self.step,
                    checkpoint=self.spec.resume_from,
                    samples_folder=self.spec.samples_folder,
                    **self._open(rank, Phase.BUILDING),
                ),
            )
            for rank in ranks
        ]

    def _draw(self, purpose: Purpose, step: int, count: int) -> list[Action]:
        return [DrawPrompts(step=step, purpose=purpose, groups=self.groups.draw(step, purpose, count))]

    def _say_who_is_full(self, full: Iterable[str]) -> list[Action]:
        """Say of each engine once a step that its samples hold up new ones."""
        now_full = dict.fromkeys(full)
        new = [engine for engine in now_full if engine not in self._full]
        self._full = now_full
        most = self.spec.max_stored_tokens
        return [
            Say(
                text=f"{engine} generates no more before samples are trained on: it keeps up to {most} tokens "
                "(policy.generation.max_stored_tokens)"
            )
            for engine in new
        ]

    def _drop_kept(self, groups: Sequence[Group]) -> list[Action]:
        """Drop what was made before the run was resumed with weights that come of groups made now, which may differ."""
        made = [group.step for group in groups if group.purpose == "train" and not self._kept.has(group)]
        dropped = self._kept.drop_from(min(made)) if made else set()
        if not dropped:
            return []
        restored = [
            group
            for group in self.groups
            if (group.step, group.number) in dropped
            and group.state in (GroupState.IN_FLIGHT, GroupState.READY)
            and self._kept.is_restored(group.request)
        ]
        return [DropKept(version=min(made), num_groups=len(dropped)), *self._take_back(restored)]

    def _make_instead(self, member: str, failed: Failed) -> list[Action]:
        """Have groups generated that could not be taken from disk."""
        self.groups.close_request(failed.command_id)
        groups = self.groups.of_engine(member, GroupState.IN_FLIGHT)
        lost = [group for group in groups if group.request == failed.command_id]
        self._kept.lose(lost)
        return [Say(text=f"{failed.error}; they are generated again"), *self._take_back(lost)]

    def _take_back(self, restored: Sequence[Group]) -> list[Action]:
        """Have groups wait again that were to come from disk, or did."""
        for group in restored:
            self._assignment.finished(str(group.engine), group, len(group.unfinished))
        return self._put_back(restored)

    def _dispatch_groups(self, engine: str, groups: Sequence[Group]) -> list[Action]:
        """Have an engine generate groups of one step, and take those that were before from disk."""
        kept = [group for group in groups if self._kept.has(group)]
        made = [group for group in groups if not self._kept.has(group)]
        actions = [self._dispatch_prompts(engine, made)] if made else []
        if kept:
            fields = self._open(engine, Phase.GENERATING)
            order = RestoreSamples(
                step=kept[0].step,
                files=self._kept.files(kept, fields["command_id"]),
                num_samples=kept[0].size.num_samples,
                **fields,
            )
            self.groups.assign(kept, engine, order.command_id)
            actions.append(Dispatch(member=engine, order=order))
        return actions

    def _dispatch_prompts(self, engine: str, groups: Sequence[Group]) -> Action:
        """Ask an engine for groups of one step, beside what it was asked for before."""
        step, purpose = groups[0].step, groups[0].purpose
        # An engine may be at the batches of the steps before, and validation comes after all that it has begun.
        num_ahead = step - self.step if purpose == "train" else self.spec.max_trajectory_age_steps
        fields = self._open(engine, Phase.GENERATING if purpose == "train" else Phase.VALIDATING, 1 + num_ahead)
        oldest = next(self.requests.of(engine, *_GENERATION))
        self.groups.assign(groups, engine, fields["command_id"])
        return DispatchPrompts(
            member=engine,
            step=step,
            purpose=purpose,
            groups=tuple(group.number for group in groups),
            cancel_before=oldest.command_id,
            **fields,
        )

    def _dispatch_batches(self, purpose: Purpose) -> list[Action]:
        phase = Phase.TRAINING if purpose == "train" else Phase.VALIDATING
        return [
            DispatchBatch(member=rank, step=self.step, purpose=purpose, **self._open(rank, phase))
            for rank in self._membership.all("trainer")
        ]

    def _make_again(self) -> list[Action]:
        """Have the samples that trainers could not fetch made again; no rank has stepped."""
        progress = self.progress
        missing, progress.missing, progress.is_training = progress.missing, {}, False
        why = "; ".join(f"{engine}: {reason}" for engine, reason in missing.items())
        if progress.num_fetches == _MAX_FETCHES:
            tried = f"{why} ({_MAX_FETCHES} times in this step)"
            raise ServiceError("coordinator", f"training step {progress.number}", f"samples are missing: {tried}")
        self.publication.resume()
        if self._is_interrupted:
            self._abandon_step()
            return self._run_rules()
        if not self.spec.has_engines:  # they are of a record, and are still there
            return [Say(text=f"samples of step {self.step} are missing and are fetched again: {why}")]
        groups = self.groups.untake(self.step, "train")
        return [
            Say(text=f"samples of step {self.step} are missing and are made again: {why}"),
            *self._put_back([group for group in groups if group.engine in missing]),
        ]

    def _drop_too_old(self, groups: Sequence[Group]) -> list[Action]:
        """Have groups made again that were begun with weights too old for their step."""
        old = [g for g in groups if g.purpose == "train" and g.oldest_version < self._oldest_version(g.step)]
        self._num_too_old += len(old)
        return self._put_back(old)

    def _put_back_suspects(self) -> list[Action]:
        """Discard what engines made that does not count any more."""
        actions: list[Action] = []
        while self.publication.suspects:
            engine = self.publication.suspects.pop(0)
            groups = self.groups.of_engine(engine, GroupState.IN_FLIGHT, GroupState.READY)
            if self.groups.num_in_flight(engine) and self.publication.engines[engine].status is not Status.ABSENT:
                actions.append(self._stop_engine(engine))
            self._drop_generation(engine)
            self._assignment.withdraw(engine)
            actions += self._put_back(groups)
        return actions

    def _move_from_slow_engines(self) -> list[Action]:
        """Have groups wait again that an engine holds too long while another has nothing to do."""
        stops: list[Action] = []
        moved: list[Group] = []
        for engine in self._assignment.overstayed(self.requests.now):
            moved += self.groups.of_engine(engine, GroupState.IN_FLIGHT)
            stops.append(self._stop_engine(engine))
            self._drop_generation(engine)
        return [*stops, *self._put_back(moved)]

    def _stop_engine(self, engine: str) -> Action:
        """Have an engine give up what it generates."""
        group = self.groups.of_engine(engine, GroupState.IN_FLIGHT)[0]
        fields = self.requests.notice(self.spec.deadlines.generate)
        return DispatchPrompts(
            member=engine,
            step=group.step,
            purpose=group.purpose,
            groups=(),
            cancel_before=fields["command_id"],
            **fields,
        )

    def _drop_generation(self, engine: str) -> None:
        """Wait no longer for what an engine was asked to generate."""
        for request in [*self.requests.of(engine, *_GENERATION)]:
            self.requests.close(request.command_id)
            self.groups.close_request(request.command_id)

    def _put_back(self, groups: Sequence[Group]) -> list[Action]:
        """Have groups wait again; discard what was made of them."""
        numbers: dict[tuple[int, Purpose], list[int]] = {}
        for group in groups:
            numbers.setdefault((group.step, group.purpose), []).append(group.number)
        self.groups.put_back(groups)
        self._assignment.put_back(groups)
        return [
            DiscardSamples(step=step, purpose=purpose, groups=tuple(discarded))
            for (step, purpose), discarded in numbers.items()
        ]

    # --- the end -----------------------------------------------------------------------------------------------------

    def _interrupt(self) -> list[Action]:
        """Finish a step that is training, abandon one that is generating; then save and end. Asked twice: end now."""
        if self._error is not None:
            return self._end("failed", self._error)
        if self._is_interrupted or self._stage is not None:
            return self._end("interrupted")
        self._is_interrupted = True
        if self.phase in _GENERATION:
            self.requests.drop_all_but(Phase.WRITING, Phase.RECORDING)
        self.requests.drop_all(*_GENERATION)  # also beside training
        self._stop_generating()
        self.progress.is_validated |= self.progress.is_validating
        self.progress.is_validating = False
        if self._has_started and not self.progress.is_trained and not self.progress.is_training:
            self._abandon_step()
        return []

    def _abandon_step(self) -> None:
        """Go back to the last step that was done, and save it if it was not saved."""
        self.groups.remove(self.step, "train")
        self.progress = StepProgress(self.step - 1, is_trained=True, is_committed=True)

    def _stop_generating(self) -> None:
        self.groups.clear()
        self._assignment.clear()
        self.publication.stop()

    def _check_deadlines(self) -> list[Action]:
        """Give up what is late and not needed. Raise `DeadlineExceeded` for the first other request, or process."""
        allowed_s = self.spec.deadlines.join
        if self._stage is Phase.JOINING and self._watch.in_phase(self.requests.now) > allowed_s:
            what = f"{self._membership.missing()} did not join within {allowed_s:g} s"
            raise DeadlineExceeded("coordinator", "waiting for processes to join", what)
        given_up = self._recording.give_up_late()
        while (late := self.requests.overdue()) is not None and late.phase is Phase.RECORDING:
            self.requests.close(late.command_id)
            given_up += self._recording.take_failure(late.command_id, f"no answer within {late.allowed_s:g} s")
        if late is not None:
            if late.phase is Phase.WRITING:
                self._saving.give_up()
            raise DeadlineExceeded(late.member, late.phase.value, f"no answer within {late.allowed_s:g} s")
        if self._full and self._is_stuck():
            raise ServiceError(
                next(iter(self._full)),
                Phase.GENERATING.value,
                f"it can keep {self.spec.max_stored_tokens} tokens, and a step needs more before it can be trained on: "
                "raise policy.generation.max_stored_tokens, or have more engines",
            )
        not_replaced = self.publication.overdue()
        if not_replaced is not None:
            raise not_replaced
        self._check_standstill()
        return given_up

    def _check_standstill(self) -> None:
        """Raise `ServiceError` if nobody has been asked for anything for a while: no event would ever come."""
        now = self.requests.now
        is_awaited = (
            len(self.requests) or self._recording.is_waiting or self.publication.engines.num_having(Status.ABSENT)
        )
        if is_awaited or self._stage is not None:
            self._still_since = math.inf
            return
        self._still_since = min(self._still_since, now)
        if now - self._still_since > _STANDSTILL_S:
            waiting = sum(group.state is GroupState.WAITING for group in self.groups)
            raise ServiceError(
                "coordinator",
                f"step {self.step}, {self.phase.value}",
                f"nobody is asked for anything, {waiting} rollout groups wait, and no rule fires: a mistake of "
                "Tandem's, which the journal in the run folder helps to find; --resume goes on",
            )

    def _fail(self, error: ServiceError) -> list[Action]:
        """End the run, at once unless a checkpoint is being written that can still be whole."""
        if self._error is None and self._saving.is_out:
            self._error = error
            self.requests.drop_all_but(Phase.WRITING)
            self._stop_generating()
            return [Say(text=f"{error}; the run ends as soon as its last checkpoint is written")]
        return self._end("failed", self._error or error)

    def _end(
        self, outcome: Literal["finished", "interrupted", "failed"], error: ServiceError | None = None
    ) -> list[Action]:
        self.requests.drop_all_but()
        self._finish = Finish(outcome=outcome, error=error)
        return [self._finish]

    def _open(self, member: str, phase: Phase, num_batches: int = 1) -> CommandFields:
        deadlines = self.spec.deadlines
        allowed: dict[Phase, float] = {
            Phase.BUILDING: deadlines.build,
            Phase.GENERATING: deadlines.generate,
            Phase.TRAINING: deadlines.train,
            Phase.VALIDATING: deadlines.generate if self.spec.has_engines else deadlines.evaluate,
        }
        return self.requests.open(member, phase, num_batches * allowed[phase])


def _make_assignment(spec: RunSpec) -> Assignment:
    if spec.balance is None:
        return PinnedAssignment()
    return BalancedAssignment(width=spec.balance.width, timeout_s=spec.balance.timeout_s)
