"""The coordinator's decisions: an event changes the tables, and rules run until none fires. Pure.

`Scheduler.handle` takes one event and returns the actions it leads to. It applies the event to the tables, and then the
agenda runs the rules until none fires. It opens no socket, reads no clock (every event carries ``now``), touches no
file and knows no arrays. So a whole run, with every failure in it, is tested as a list of events and actions.
`tandem.coordinator.loop.loop` carries the actions out.

    event ─▶ applied: `losing`, `steps`, `publishing`, ... ─▶ `agenda`: `rules`, until none fires ─▶ actions
                               └───────── `tables` ─────────────┘

The rules, each of which fires when its condition over the tables holds:

| rule | fires when | and then |
|---|---|---|
| set up | every process has done what the stage before asked for | build, plan, install, connect |
| let go | nothing is needed any more of a draining engine | it goes |
| welcome | an engine has joined that the run had not waited for | build it, plan for it |
| build | an engine comes in the place of a lost one, and no trainer works on its GPU | it is built |
| publish | trainers hold a version that an engine lacks, and it may take it | refit it, verify it, record |
| discard | an engine is lost or invalidated, or made samples with unverified weights | its groups wait again |
| record | a step has trained | rollouts log its samples meanwhile |
| start | the weights to start from have reached the engines | the first step begins |
| offer | every rank has trained, the last version is verified and no longer read | trainers hold, or copy, a new one |
| validate | a step has trained, it is due, and engines hold the new version | groups, or a batch, are evaluated |
| publish checkpoint | a checkpoint is written, and its steps are in the rollout log | it gets its name |
| save | it is due, no checkpoint is being written, no engine built | copy; write meanwhile |
| commit | trained, validated, copied | the step is in the journal |
| advance | the step in progress is committed | the next one begins |
| draw | a step is at most `max_trajectory_age_steps` ahead of the one in progress | its groups wait |
| assign | an engine that holds a version young enough for a waiting group has room | it generates, or restores |
| train | its groups are ready, their versions verified, and no engine reads weights or is built | every rank trains |
| finish | the last step is committed, and nothing is pending | the run ends |

A rule is a function of the tables. It returns None if it does not fire, and else its actions. These may be none if it
has changed the tables. The first rule that can fire does, and then again the first that can. A rule is asked only if a
table that it reads has changed since it was last asked (`agenda`). `RULES` declares the tables of each.

Synchronous training is an age of zero: generation for a step waits until the weights of the step before are published.
An algorithm over a data set has no engines, so the rules about engines do not fire. An error on the way ends the run
(`start_and_end.fail`). Streaming training has one rule more, asked right after *train* (`rules.streaming`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import assert_never

from tandem.common import messages
from tandem.common.errors import ServiceError
from tandem.coordinator.scheduler import events
from tandem.coordinator.scheduler.agenda import RuleAgenda, RuleMode, RuleTables, TableRule
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.groups.table import RestoredGroups
from tandem.coordinator.scheduler.rules import (
    leaving,
    losing,
    publishing,
    recovery,
    regeneration,
    start_and_end,
    steps,
    streaming,
)
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import IsInformative, SchedulerTables


class Scheduler:
    """Decides which engine generates what, when to train, and when weights move."""

    def __init__(
        self,
        spec: RunSpec,
        now: float,
        is_informative: IsInformative = bool,
        first_command_id: int = 1,
        agenda: Callable[
            [Mapping[RuleMode, tuple[TableRule[SchedulerTables], ...]]], RuleAgenda[SchedulerTables]
        ] = RuleAgenda,
    ) -> None:
        """Take the run's spec, and for dynamic sampling the function that tells whether a group is worth training on.

        `first_command_id` is above that of any command in an earlier attempt. `agenda` creates the agenda of rules.
        """
        self.agenda = agenda(RULES if spec.streaming is None else add_rule(streaming.STREAM, after=TRAIN))
        self.tables = SchedulerTables(spec, now, is_informative, first_command_id, self.agenda.changes)
        self._may_phase_differ = self.agenda.watch(
            RuleTables.STEPS, RuleTables.SAVING, RuleTables.WEIGHTS, RuleTables.ENGINES, RuleTables.REQUESTS
        )

    def handle(self, event: events.Event) -> list[events.Action]:
        """Take one event; return the actions it leads to, in order."""
        tables = self.tables
        tables.requests.now = event.now
        if tables.finish is not None:
            return []
        try:
            actions = _apply(tables, event)
            actions += self.agenda.run(tables)
        except ServiceError as error:
            actions = start_and_end.fail(tables, error)
            tables.watch.enter(tables.phase, event.now)
        if self._may_phase_differ():
            tables.watch.enter(tables.phase, event.now)
        if not tables.is_synchronous:
            steps.note(tables)
        return actions


def _apply(tables: SchedulerTables, event: events.Event) -> list[events.Action]:
    """Apply an event to the tables; return the actions that follow at once."""
    match event:
        case events.ProcessReplied(process=process, reply=reply):
            return _apply_reply(tables, process, reply)
        case events.ProcessJoined():
            return losing.take_joined(tables, event)
        case events.CommandErred(process=process, failed=failed):
            return losing.take_failure(tables, process, failed)
        case events.ProcessLost(process=process, reason=reason):
            return losing.take_loss(tables, process, reason)
        case events.AwaitedByHand(process=process):
            tables.engines.await_by_hand(process)
            return []
        case events.EngineDraining(process=process):
            return leaving.take_leaving(tables, process)
        case events.PromptsDrawn():
            steps.take_prompts(tables, event)
            return []
        case events.RestoredFound(groups=groups):
            tables.restored = RestoredGroups(groups)
            return []
        case events.TimePassed() if tables.is_all_in_time:
            tables.still_since = math.inf
            return []
        case events.TimePassed():
            return [*losing.check(tables), *regeneration.move_from_slow_engines(tables)]
        case events.StopRequested():
            return start_and_end.interrupt(tables)
        case unhandled:
            assert_never(unhandled)


def _apply_reply(tables: SchedulerTables, process: str, reply: messages.Reply) -> list[events.Action]:
    if reply.command_id not in tables.requests:
        return []  # a repetition, or the answer to a command that was given up
    if isinstance(reply, messages.SamplesFinished):  # a part of an answer
        return steps.take_results(tables, process, reply)
    tables.requests.close(reply.command_id)
    tables.groups.close_request(reply.command_id)
    match reply:
        case messages.SamplesMissing(rollouts=missing):
            tables.progress.missing |= missing
        case messages.Trained(has_update=has_update):
            tables.progress.has_update |= has_update
        case messages.Generated() | messages.CheckpointCopied() | messages.Evaluated() | messages.GroupsStreamed():
            pass  # all that matters of it is that it came
        case messages.CheckpointSaved():
            tables.saving.take_written(process)
        case messages.SamplesRecorded():
            return tables.recording.take_recorded(reply)
        case messages.RendezvousOpened():
            publishing.take_reply(tables, process, reply)
            return start_and_end.build_trainers(tables, reply)
        case _:
            if isinstance(reply, messages.EngineBuilt):
                tables.recording.take_built(process)
            return publishing.take_reply(tables, process, reply)
    return []


_WEIGHTS = (RuleTables.WEIGHTS, RuleTables.ENGINES, RuleTables.REQUESTS)
"""The tables that show how far a version is on its way, and whether the step waits for it."""


SET_UP = TableRule(
    name="set up",
    fire=start_and_end.set_up,
    opens_with=(),
    is_open=lambda tables: True,
    reads=(RuleTables.PROCESSES, RuleTables.REQUESTS),
)
LET_GO = TableRule(
    name="let go",
    fire=leaving.let_go,
    opens_with=(RuleTables.LEAVING,),
    is_open=lambda tables: bool(tables.engines.draining),
    reads=(
        RuleTables.ENGINES,
        RuleTables.GROUPS,
        RuleTables.READY,
        RuleTables.WAITING,
        RuleTables.STEPS,
        RuleTables.RECORDING,
        RuleTables.REQUESTS,
    ),
)
WELCOME = TableRule(
    name="welcome",
    fire=leaving.welcome,
    opens_with=(RuleTables.JOINING,),
    is_open=lambda tables: bool(tables.joining.stages or tables.joining.entered),
    reads=(RuleTables.ENGINES, RuleTables.STEPS, RuleTables.WEIGHTS, RuleTables.WAITING, RuleTables.REQUESTS),
)
BUILD = TableRule(
    name="build",
    fire=recovery.build,
    opens_with=(RuleTables.ENGINES,),
    is_open=lambda tables: tables.engines.num_having(EngineStatus.JOINED) > 0,
    reads=(RuleTables.REQUESTS,),
)
PUBLISH = TableRule(
    name="publish",
    fire=publishing.publish,
    opens_with=(RuleTables.WEIGHTS, RuleTables.ENGINES),
    is_open=lambda tables: not tables.weights.is_done,
    reads=(RuleTables.GROUPS, RuleTables.REQUESTS),
)
DISCARD = TableRule(
    name="discard",
    fire=regeneration.discard,
    opens_with=(RuleTables.INVALIDATED,),
    is_open=lambda tables: bool(tables.engines.invalidated),
)
RECORD: TableRule[SchedulerTables] = TableRule(
    name="record",
    fire=lambda tables: tables.recording.run_rule(),
    opens_with=(RuleTables.RECORDING,),
    is_open=lambda tables: bool(tables.recording.waiting),
)
START = TableRule(
    name="start",
    fire=start_and_end.start,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: not tables.steps.has_started,
    reads=_WEIGHTS,
)
OFFER = TableRule(
    name="offer",
    fire=steps.offer,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: tables.progress.state is StepState.TRAINING,
    reads=_WEIGHTS,
)
VALIDATE = TableRule(
    name="validate",
    fire=steps.validate,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: (
        tables.steps.has_started and StepState.TRAINED <= tables.progress.state < StepState.VALIDATED
    ),
    reads=(*_WEIGHTS, RuleTables.READY),
)
PUBLISH_CHECKPOINT = TableRule(
    name="publish checkpoint",
    fire=steps.publish_checkpoint,
    opens_with=(RuleTables.SAVING,),
    is_open=lambda tables: tables.saving.publishable_step is not None,
    reads=(RuleTables.RECORDING,),
)
SAVE = TableRule(
    name="save",
    fire=steps.save,
    opens_with=(RuleTables.STEPS, RuleTables.SAVING),
    is_open=lambda tables: tables.saving.copied is not None or (tables.must_save and not tables.saving.is_out),
    reads=(*_WEIGHTS, RuleTables.JOINING),
)
COMMIT = TableRule(
    name="commit",
    fire=steps.commit,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: StepState.TRAINED <= tables.progress.state < StepState.COMMITTED,
    reads=(*_WEIGHTS, RuleTables.SAVING),
)
ADVANCE = TableRule(
    name="advance",
    fire=steps.advance,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: tables.progress.state is StepState.COMMITTED,
)
DRAW = TableRule(
    name="draw",
    fire=steps.draw,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: (
        tables.steps.has_started
        and tables.spec.has_engines
        and not tables.steps.is_interrupted
        and (tables.spec.dynamic_sampling is not None or tables.steps.drawn < tables.newest_step)
    ),
    reads=(RuleTables.READY, RuleTables.ENGINES),
)
ASSIGN = TableRule(
    name="assign",
    fire=steps.assign,
    opens_with=(RuleTables.WAITING,),
    is_open=lambda tables: tables.assignment.is_waiting or bool(tables.full),
    reads=(RuleTables.ENGINES, RuleTables.WEIGHTS, RuleTables.STORED),
)
TRAIN = TableRule(
    name="train",
    fire=steps.train,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: (
        tables.progress.state is StepState.GENERATING and tables.steps.has_started and not tables.steps.is_interrupted
    ),
    reads=(RuleTables.READY, RuleTables.ENGINES, RuleTables.WEIGHTS, RuleTables.JOINING),
)
FINISH = TableRule(
    name="finish",
    fire=start_and_end.finish,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: (
        tables.error is not None
        or (
            tables.progress.state is StepState.COMMITTED
            and tables.steps.has_started
            and (tables.steps.is_interrupted or tables.is_last)
        )
    ),
    reads=(*_WEIGHTS, RuleTables.RECORDING, RuleTables.SAVING),
)

RULES: dict[RuleMode, tuple[TableRule[SchedulerTables], ...]] = {
    RuleMode.SETTING_UP: (SET_UP,),
    RuleMode.GOING_ON: (
        LET_GO,
        WELCOME,
        BUILD,
        PUBLISH,
        DISCARD,
        RECORD,
        START,
        OFFER,
        VALIDATE,
        PUBLISH_CHECKPOINT,
        SAVE,
        COMMIT,
        ADVANCE,
        DRAW,
        ASSIGN,
        TRAIN,
        FINISH,
    ),
    RuleMode.FAILING: (PUBLISH_CHECKPOINT, FINISH),
}
"""The rules of each mode, in the order in which they are asked."""


def add_rule(
    rule: TableRule[SchedulerTables], *, after: TableRule[SchedulerTables]
) -> Mapping[RuleMode, tuple[TableRule[SchedulerTables], ...]]:
    """Return the rules with one more, asked right after one of the others."""
    place = RULES[RuleMode.GOING_ON].index(after) + 1
    rules = RULES[RuleMode.GOING_ON]
    return {**RULES, RuleMode.GOING_ON: (*rules[:place], rule, *rules[place:])}
