"""What to do next: the coordinator's decisions, pure.

`SynchronousPlan.handle` takes one event and returns the actions it leads to. It opens no socket, reads no clock (every
event carries ``now``), touches no file and knows no arrays, so that a whole run, with every failure in it, is tested as
a list of events and actions. `tandem.coordinator.loop` carries the actions out.

The synchronous plan does one phase at a time::

    joining -> building -> planning -> installing -> connecting -> refitting -> [validating] -> [saving]
                                                                       ^                           |
                                                                       |                    commit the step
                                                                       |                           |
                                                                    training  <-- generating  <----+

A phase is over when nothing is outstanding: every order was answered, and no engine is on its way back. A version is
attested beside the phase that follows its refit, and is outstanding there, so no sample is used before that. With
dynamic sampling, generating may follow on generating (`tandem.coordinator.draws`). Saving is copying: what was copied
is written to disk beside the phases that follow, up to the next saving or the end (`tandem.coordinator.saves`). SFT has
no engines: it goes from building to training, and from training to validating. What concerns weights is in
`tandem.coordinator.weights`.
"""

from __future__ import annotations

from typing import Literal, assert_never

from tandem.common.errors import CommandFailed, DeadlineExceeded, ServiceError, ServiceLost
from tandem.common.messages import (
    BuildEngine,
    BuildTrainer,
    CheckpointSaved,
    Failed,
    OpenRendezvous,
    Purpose,
    RendezvousOpened,
    Reply,
    SamplesFinished,
    SamplesMissing,
    Trained,
)
from tandem.coordinator.decisions import (
    Action,
    CommitStep,
    Dispatch,
    DispatchBatch,
    Erred,
    Event,
    Finish,
    Interrupted,
    Joined,
    Lost,
    Phase,
    Replied,
    RunShape,
    Say,
    Ticked,
)
from tandem.coordinator.draws import Draws, Teaches
from tandem.coordinator.hands import BalancedHands, DealtHands, GroupSize, Hands, Sizes, Task
from tandem.coordinator.orders import Orders, Promise
from tandem.coordinator.roster import Roster
from tandem.coordinator.saves import Saves
from tandem.coordinator.stopwatch import Stopwatch
from tandem.coordinator.weights import WeightPlane

_SET_UP = (Phase.JOINING, Phase.BUILDING, Phase.PLANNING, Phase.INSTALLING, Phase.CONNECTING)


class SynchronousPlan:
    """Generate, train, refit, one after the other: no sample is ever older than the weights it trains."""

    def __init__(self, shape: RunShape, now: float, sizes: Sizes | None = None, teaches: Teaches | None = None) -> None:
        """`sizes` says what each prompt group asks of an engine; by default they are alike.

        `teaches` says whether one is worth training on, where the shape has dynamic sampling; by default they all are.
        """
        self.shape = shape
        self.step = shape.first_step - 1
        """The step in progress, or the last one done."""
        self.orders = Orders(now)
        self.plane = WeightPlane(shape, self.orders)
        self._roster = Roster(shape.expected)
        self._watch = Stopwatch(now)
        self._draws = Draws(shape, teaches or bool)
        self._hands = _make_hands(shape, self.orders, sizes or _alike)
        self._saves = Saves(shape, self.orders)
        self._version = shape.first_step - 1
        self._has_update = False
        """Whether the training step in progress must have changed the weights."""
        self._is_trained = False
        """Whether the step in progress has stepped the optimizer."""
        self._is_committed = False
        """Whether the step in progress is in the journal; true while an interrupted run saves the step before."""
        self._is_interrupted = False
        self._error: ServiceError | None = None
        """Why the run has failed, while it only waits for a checkpoint."""

    @property
    def phase(self) -> Phase:
        """What the run is doing."""
        return self._watch.phase

    def handle(self, event: Event) -> list[Action]:
        """Take one event; return the actions it leads to, in order."""
        self.orders.now = event.now
        if self._is_over():
            return []
        try:
            actions = self._take(event)
            actions += self._settle_hands()
            self._draws.heed(actions)
            if not self._is_over() and not self._is_waiting():
                actions += self._next_phase()
        except ServiceError as error:
            actions = self._fail(error)
        return actions

    def _take(self, event: Event) -> list[Action]:
        match event:
            case Joined(member=member, kind=kind):
                self._roster.add(member, kind)
                is_wanted = member in self.plane.engines and self._error is None
                return self.plane.take_replacement(member) if is_wanted else []
            case Replied(member=member, reply=reply):
                return self._take_reply(member, reply)
            case Erred(member=member, failed=failed):
                return self._take_failure(member, failed)
            case Lost(member=member, why=why):
                return self._take_loss(member, why)
            case Ticked():
                self._check_deadlines()
                return self._hands.tick()
            case Interrupted():
                return self._interrupt()
            case other:
                assert_never(other)

    def _take_reply(self, member: str, reply: Reply) -> list[Action]:
        if reply.command_id not in self.orders.outstanding:
            return []  # a repetition, or the answer to an order that was abandoned
        if isinstance(reply, SamplesFinished):
            self._draws.take_samples(reply)
            return self._hands.take_samples(member, reply)  # part of an answer; the loop keeps the samples
        del self.orders.outstanding[reply.command_id]
        if isinstance(reply, SamplesMissing) and reply.members:
            lost = "; ".join(f"{rollout}: {why}" for rollout, why in reply.members.items())
            raise ServiceError(member, "fetching samples", lost)
        if isinstance(reply, Trained):
            self._has_update |= reply.has_update
        if isinstance(reply, CheckpointSaved):
            return self._saves.take_written(member)
        actions = self.plane.take_reply(member, reply)
        return self._build_trainers(reply) if isinstance(reply, RendezvousOpened) else actions

    def _take_failure(self, member: str, failed: Failed) -> list[Action]:
        order = self.orders.outstanding.pop(failed.command_id, None)
        if order is None:
            return []
        if order.phase is Phase.REFITTING or (order.phase is Phase.ATTESTING and member in self.plane.engines):
            return self.plane.take_failure(member, failed, order.phase)
        if order.phase is Phase.WRITING:
            self._saves.give_up()
        raise CommandFailed(member, failed.phase, failed.account)

    def _take_loss(self, member: str, why: str) -> list[Action]:
        """Replace an engine that is lost; the run cannot go on without any other process."""
        if self._saves.is_owed_by(member):
            self._saves.give_up()
        elif self._error is not None:
            return []
        if self._is_interrupted and self._roster.kind(member) == "rollout":
            self.orders.drop(member)
            return []
        if self.phase in _SET_UP or member not in self.plane.engines:
            raise ServiceLost(member, self.phase.value, why)
        return self.plane.take_loss(member, self.phase.value, why)

    def _settle_hands(self) -> list[Action]:
        """Discard what engines made that do not count any more, and ask those that can for it again."""
        actions: list[Action] = []
        for engine in self.plane.take_suspects():
            actions += self._hands.withdraw(engine)
        for engine in self.plane.take_restored():
            actions += self._hands.restore(engine)
        return actions

    # --- phases ------------------------------------------------------------------------------------------------------

    def _next_phase(self) -> list[Action]:
        """Leave the current phase, in which nothing is outstanding, and enter the one that follows."""
        match self.phase:
            case Phase.JOINING:
                return [] if self._roster.missing() else self._build()
            case Phase.BUILDING:
                return self._plan_transfers() if self._has_engines() else self._begin()
            case Phase.PLANNING:
                self._enter(Phase.INSTALLING)
                return self.plane.install()
            case Phase.INSTALLING:
                self._enter(Phase.CONNECTING)
                return self.plane.connect() or self._refit()
            case Phase.CONNECTING:
                return self._refit()
            case Phase.REFITTING:
                attest = self.plane.attest()
                return attest + (self._validate_or_go_on() if self._is_trained else self._begin())
            case Phase.GENERATING:
                more = self._draws.more()
                return self._generate(more) if more else self._train()
            case Phase.TRAINING:
                self._is_trained = True
                self._version = self.step
                if self._is_interrupted or not self._has_engines():
                    return self._validate_or_go_on()
                return self._refit()
            case Phase.VALIDATING:
                self._hands.clear()
                return self._save_or_go_on()
            case Phase.SAVING:
                return self._write() if self._saves.is_copied else self._copy()
            case Phase.ATTESTING | Phase.WRITING:
                return self._next_step()
            case Phase.FINISHED:
                raise AssertionError("no phase follows")
            case other:
                assert_never(other)

    def _build(self) -> list[Action]:
        self._enter(Phase.BUILDING)
        meet = OpenRendezvous(**self._promise("trainer-0"))
        return [
            Dispatch(member="trainer-0", order=meet),
            *(Dispatch(member=e, order=BuildEngine(**self._promise(e))) for e in self._roster.all("rollout")),
        ]

    def _build_trainers(self, opened: RendezvousOpened) -> list[Action]:
        ranks = self._roster.all("trainer")
        return [
            Dispatch(
                member=rank,
                order=BuildTrainer(
                    rendezvous_host=opened.host,
                    rendezvous_port=opened.port,
                    world_size=len(ranks),
                    version=self._version,
                    checkpoint=self.shape.resume_from,
                    **self._promise(rank),
                ),
            )
            for rank in ranks
        ]

    def _plan_transfers(self) -> list[Action]:
        self._enter(Phase.PLANNING)
        return self.plane.plan_transfers(self._roster.all("trainer"), self._roster.all("rollout"))

    def _refit(self) -> list[Action]:
        self._enter(Phase.REFITTING)
        return self.plane.refit(self._version, has_update=self._has_update)

    def _begin(self) -> list[Action]:
        """Everything is built: validate the starting weights if asked to, else start the first step."""
        self._watch.begin_step(self._now)  # what came before was no step
        if self._is_interrupted:
            return self._finish("interrupted")
        if self.shape.validate_at_start and self.step == 0:
            return self._validate()
        return self._next_step()

    def _next_step(self) -> list[Action]:
        if self._is_interrupted or self._error is not None or self.step >= self.shape.last_step:
            return self._end()
        self.step += 1
        self._is_trained = self._is_committed = False
        self._watch.begin_step(self._now)
        return self._generate(self._draws.begin()) if self._has_engines() else self._train()

    def _generate(self, groups: range) -> list[Action]:
        self._enter(Phase.GENERATING)
        return self._dispatch_prompts("train", groups)

    def _train(self) -> list[Action]:
        self._enter(Phase.TRAINING)
        self._hands.clear()
        self._has_update = False
        self.plane.release()
        return self._dispatch_batches("train")

    def _validate_or_go_on(self) -> list[Action]:
        every = self.shape.validate_every
        due = every > 0 and (self.step % every == 0 or self.step == self.shape.last_step)
        if due and not self._is_interrupted:
            return self._validate()
        return self._save_or_go_on()

    def _validate(self) -> list[Action]:
        self._enter(Phase.VALIDATING)
        if self._has_engines():
            return self._dispatch_prompts("validate", range(self.shape.num_validation_groups))
        return self._dispatch_batches("validate")

    def _save_or_go_on(self) -> list[Action]:
        every = self.shape.save_every
        due = every > 0 and (self.step % every == 0 or self.step == self.shape.last_step or self._is_interrupted)
        return self._save() if due and self.step > 0 else self._commit_step()

    def _save(self) -> list[Action]:
        self._enter(Phase.SAVING)
        return [] if self._saves.is_out else self._copy()

    def _copy(self) -> list[Action]:
        return self._saves.copy(self.step, self._roster.all("trainer"))

    def _write(self) -> list[Action]:
        write = self._saves.write(self._roster.all("trainer"))
        return write + (self._next_step() if self._is_committed else self._commit_step())

    def _commit_step(self) -> list[Action]:
        seconds = self._watch.read(self._now)
        self._is_committed = True
        return [CommitStep(step=self.step, version=self._version, seconds=seconds), *self._next_step()]

    # --- the end -----------------------------------------------------------------------------------------------------

    def _interrupt(self) -> list[Action]:
        """Finish a step that is training, abandon one that is generating; then save and end. Asked twice: end now."""
        if self._error is not None:
            return self._fail(self._error)
        if self._is_interrupted or self.phase in _SET_UP:
            return self._finish("interrupted")
        self._is_interrupted = True
        if self.phase in (Phase.VALIDATING, Phase.GENERATING):
            self.orders.drop_all_but(Phase.WRITING)
            self._hands.clear()
        self.plane.stop()
        if self.phase is Phase.VALIDATING:
            return self._save_or_go_on()
        if self.phase is Phase.GENERATING:
            return self._abandon_step()
        return []

    def _abandon_step(self) -> list[Action]:
        """Go back to the last step that was done, and save it if it was not saved."""
        self.step -= 1
        self._is_committed = True
        if self.step < self.shape.first_step or self.shape.save_every == 0 or self.step % self.shape.save_every == 0:
            return self._end()
        return self._save()

    def _end(self) -> list[Action]:
        """End the run once nothing is outstanding: a last version to attest, or a checkpoint to write."""
        if self.orders.outstanding:
            self._enter(Phase.WRITING if self._saves.is_out else Phase.ATTESTING)
            return []
        if self._error is not None:
            return self._fail(self._error)
        return self._finish("interrupted" if self._is_interrupted else "finished")

    def _check_deadlines(self) -> None:
        """Raise `DeadlineExceeded` for the first order, or process, that is late."""
        allowed_s = self.shape.deadlines.join
        if self.phase is Phase.JOINING and self._watch.in_phase(self._now) > allowed_s:
            what = f"{self._roster.missing()} did not join within {allowed_s:g} s"
            raise DeadlineExceeded("coordinator", "waiting for processes to join", what)
        late = self.orders.overdue()
        if late is not None:
            if late.phase is Phase.WRITING:
                self._saves.give_up()
            raise DeadlineExceeded(late.member, late.phase.value, f"no answer within {late.allowed_s:g} s")
        not_replaced = self.plane.overdue()
        if not_replaced is not None:
            raise not_replaced

    def _fail(self, error: ServiceError) -> list[Action]:
        """End the run, at once unless a checkpoint is being written that can still be whole."""
        if self._error is None and self._saves.is_out:
            self._error = error
            self.orders.drop_all_but(Phase.WRITING)
            self._hands.clear()
            self.plane.stop()
            self._enter(Phase.WRITING)
            return [Say(text=f"{error}; the run ends as soon as its last checkpoint is written")]
        self._enter(Phase.FINISHED)
        self.orders.outstanding.clear()
        return [Finish(outcome="failed", error=self._error or error)]

    def _finish(self, outcome: Literal["finished", "interrupted"]) -> list[Action]:
        self._enter(Phase.FINISHED)
        self.orders.outstanding.clear()
        return [Finish(outcome=outcome)]

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self.orders.now

    def _is_over(self) -> bool:
        return self.phase is Phase.FINISHED

    def _is_waiting(self) -> bool:
        """Whether the phase cannot end yet. A checkpoint that is being written holds up only the next, and the end."""
        holds_up = self.phase in (Phase.SAVING, Phase.WRITING)
        owed = [order for order in self.orders.outstanding.values() if holds_up or order.phase is not Phase.WRITING]
        return bool(owed) or self.plane.is_recovering

    def _has_engines(self) -> bool:
        return self.shape.has_engines

    def _enter(self, phase: Phase) -> None:
        self._watch.enter(phase, self._now)

    def _allowed_s(self) -> float:
        deadlines = self.shape.deadlines
        allowed: dict[Phase, float] = {
            Phase.BUILDING: deadlines.build,
            Phase.GENERATING: deadlines.generate,
            Phase.TRAINING: deadlines.train,
            Phase.VALIDATING: deadlines.generate if self._has_engines() else deadlines.evaluate,
            Phase.SAVING: deadlines.save,
        }
        return allowed[self.phase]

    def _promise(self, member: str) -> Promise:
        return self.orders.promise(member, self.phase, self._allowed_s())

    def _dispatch_prompts(self, purpose: Purpose, groups: range) -> list[Action]:
        task = Task(step=self.step, purpose=purpose, phase=self.phase, allowed_s=self._allowed_s(), groups=groups)
        return self._hands.deal(task, self._roster.all("rollout"))

    def _dispatch_batches(self, purpose: Purpose) -> list[Action]:
        return [
            DispatchBatch(member=rank, step=self.step, purpose=purpose, **self._promise(rank))
            for rank in self._roster.all("trainer")
        ]


def _make_hands(shape: RunShape, orders: Orders, sizes: Sizes) -> Hands:
    if shape.balance is None:
        return DealtHands(orders)
    return BalancedHands(orders, sizes, width=shape.balance.width, timeout_s=shape.balance.timeout_s)


def _alike(task: Task) -> list[GroupSize]:
    return [GroupSize(num_samples=1, num_tokens=1)] * len(task.groups)
