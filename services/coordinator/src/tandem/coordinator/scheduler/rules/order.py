"""The rules: each fires when its condition over the tables holds, and they run until none does.

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
table that it reads has changed since it was last asked (`agenda`). Each declares its tables here.

Synchronous training is an age of zero: generation for a step waits until the weights of the step before are published.
An algorithm over a data set has no engines, so the rules about engines do not fire.
"""

from __future__ import annotations

from tandem.coordinator.scheduler.agenda import RuleMode, RuleTables, TableRule
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.rules.generation import assign, draw
from tandem.coordinator.scheduler.rules.leaving import let_go, welcome
from tandem.coordinator.scheduler.rules.publishing import publish
from tandem.coordinator.scheduler.rules.recovery import build
from tandem.coordinator.scheduler.rules.regeneration import discard
from tandem.coordinator.scheduler.rules.start_and_end import finish, set_up, start
from tandem.coordinator.scheduler.rules.steps import advance, commit, offer, publish_checkpoint, save, train, validate
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables

_WEIGHTS = (RuleTables.WEIGHTS, RuleTables.ENGINES, RuleTables.REQUESTS)
"""The tables that show how far a version is on its way, and whether the step waits for it."""


SET_UP = TableRule(
    name="set up",
    fire=set_up,
    opens_with=(),
    is_open=lambda tables: True,
    reads=(RuleTables.PROCESSES, RuleTables.REQUESTS),
)
LET_GO = TableRule(
    name="let go",
    fire=let_go,
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
    fire=welcome,
    opens_with=(RuleTables.JOINING,),
    is_open=lambda tables: bool(tables.joining.stages or tables.joining.entered),
    reads=(RuleTables.ENGINES, RuleTables.STEPS, RuleTables.WEIGHTS, RuleTables.WAITING, RuleTables.REQUESTS),
)
BUILD = TableRule(
    name="build",
    fire=build,
    opens_with=(RuleTables.ENGINES,),
    is_open=lambda tables: tables.engines.num_having(EngineStatus.JOINED) > 0,
    reads=(RuleTables.REQUESTS,),
)
PUBLISH = TableRule(
    name="publish",
    fire=publish,
    opens_with=(RuleTables.WEIGHTS, RuleTables.ENGINES),
    is_open=lambda tables: not tables.weights.is_done,
    reads=(RuleTables.GROUPS, RuleTables.REQUESTS),
)
DISCARD = TableRule(
    name="discard",
    fire=discard,
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
    fire=start,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: not tables.steps.has_started,
    reads=_WEIGHTS,
)
OFFER = TableRule(
    name="offer",
    fire=offer,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: tables.progress.state is StepState.TRAINING,
    reads=_WEIGHTS,
)
VALIDATE = TableRule(
    name="validate",
    fire=validate,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: (
        tables.steps.has_started and StepState.TRAINED <= tables.progress.state < StepState.VALIDATED
    ),
    reads=(*_WEIGHTS, RuleTables.READY),
)
PUBLISH_CHECKPOINT = TableRule(
    name="publish checkpoint",
    fire=publish_checkpoint,
    opens_with=(RuleTables.SAVING,),
    is_open=lambda tables: tables.saving.publishable_step is not None,
    reads=(RuleTables.RECORDING,),
)
SAVE = TableRule(
    name="save",
    fire=save,
    opens_with=(RuleTables.STEPS, RuleTables.SAVING),
    is_open=lambda tables: tables.saving.copied is not None or (tables.must_save and not tables.saving.is_out),
    reads=(*_WEIGHTS, RuleTables.JOINING),
)
COMMIT = TableRule(
    name="commit",
    fire=commit,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: StepState.TRAINED <= tables.progress.state < StepState.COMMITTED,
    reads=(*_WEIGHTS, RuleTables.SAVING),
)
ADVANCE = TableRule(
    name="advance",
    fire=advance,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: tables.progress.state is StepState.COMMITTED,
)
DRAW = TableRule(
    name="draw",
    fire=draw,
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
    fire=assign,
    opens_with=(RuleTables.WAITING,),
    is_open=lambda tables: tables.assignment.is_waiting or bool(tables.full),
    reads=(RuleTables.ENGINES, RuleTables.WEIGHTS, RuleTables.STORED),
)
TRAIN = TableRule(
    name="train",
    fire=train,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: (
        tables.progress.state is StepState.GENERATING and tables.steps.has_started and not tables.steps.is_interrupted
    ),
    reads=(RuleTables.READY, RuleTables.ENGINES, RuleTables.WEIGHTS, RuleTables.JOINING),
)
FINISH = TableRule(
    name="finish",
    fire=finish,
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
