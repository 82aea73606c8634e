"""The rules: each fires when its condition over the tables holds, and they run until none does.

| rule | fires when | and then |
|---|---|---|
| set up | every process has done what the stage before asked for | build, plan, install, connect |
| let go | nothing is needed any more of a draining engine | it goes |
| welcome | an engine has joined that the run had not waited for | build it, plan for it |
| build | an engine comes in the place of a lost one, and no trainer works on its GPU | it is built |
| publish | trainers hold a version that an engine lacks, and it may take it | refit it, verify it, record |
| discard | an engine is lost or invalidated, or made samples with unverified weights | its groups wait again |
| record | a step has trained | rollouts log its samples while the run goes on |
| start | the weights to start from have reached the engines | the first step begins |
| offer | every rank has trained, the last version is verified and no longer read | trainers hold, or copy, a new one |
| validate | a step has trained, it is due, and engines hold the new version | groups, or a batch, are evaluated |
| publish checkpoint | a checkpoint is written, and its steps are in the rollout log | it gets its name |
| save | it is due, no checkpoint is being written, no engine built | copy; write while the run goes on |
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

from tandem.coordinator.scheduler.engines.table import Status
from tandem.coordinator.scheduler.rule import Mode, Rule, Table
from tandem.coordinator.scheduler.rules.checkpoints import publish_checkpoint, save
from tandem.coordinator.scheduler.rules.ending import finish
from tandem.coordinator.scheduler.rules.generation import assign, draw
from tandem.coordinator.scheduler.rules.leaving import let_go, welcome
from tandem.coordinator.scheduler.rules.publishing import publish
from tandem.coordinator.scheduler.rules.recovery import build
from tandem.coordinator.scheduler.rules.regeneration import discard
from tandem.coordinator.scheduler.rules.setting_up import set_up, start
from tandem.coordinator.scheduler.rules.steps import advance, commit, offer, train, validate
from tandem.coordinator.scheduler.steps.progress import StepState
from tandem.coordinator.scheduler.tables import Tables

_WEIGHTS = (Table.WEIGHTS, Table.ENGINES, Table.REQUESTS)
"""The tables that show how far a version is on its way, and whether the step waits for it."""


SET_UP = Rule(
    name="set up",
    fire=set_up,
    opens_with=(),
    is_open=lambda tables: True,
    reads=(Table.PROCESSES, Table.REQUESTS),
)
LET_GO = Rule(
    name="let go",
    fire=let_go,
    opens_with=(Table.LEAVING,),
    is_open=lambda tables: bool(tables.engines.draining),
    reads=(Table.ENGINES, Table.GROUPS, Table.READY, Table.WAITING, Table.STEPS, Table.RECORDING, Table.REQUESTS),
)
WELCOME = Rule(
    name="welcome",
    fire=welcome,
    opens_with=(Table.JOINING,),
    is_open=lambda tables: bool(tables.joining.stages or tables.joining.entered),
    reads=(Table.ENGINES, Table.STEPS, Table.WEIGHTS, Table.WAITING, Table.REQUESTS),
)
BUILD = Rule(
    name="build",
    fire=build,
    opens_with=(Table.ENGINES,),
    is_open=lambda tables: tables.engines.num_having(Status.JOINED) > 0,
    reads=(Table.REQUESTS,),
)
PUBLISH = Rule(
    name="publish",
    fire=publish,
    opens_with=(Table.WEIGHTS, Table.ENGINES),
    is_open=lambda tables: not tables.weights.is_done,
    reads=(Table.GROUPS, Table.REQUESTS),
)
DISCARD = Rule(
    name="discard",
    fire=discard,
    opens_with=(Table.INVALIDATED,),
    is_open=lambda tables: bool(tables.engines.invalidated),
)
RECORD: Rule[Tables] = Rule(
    name="record",
    fire=lambda tables: tables.recording.run_rule(),
    opens_with=(Table.RECORDING,),
    is_open=lambda tables: bool(tables.recording.waiting),
)
START = Rule(
    name="start",
    fire=start,
    opens_with=(Table.STEPS,),
    is_open=lambda tables: not tables.steps.has_started,
    reads=_WEIGHTS,
)
OFFER = Rule(
    name="offer",
    fire=offer,
    opens_with=(Table.STEPS,),
    is_open=lambda tables: tables.progress.state is StepState.TRAINING,
    reads=_WEIGHTS,
)
VALIDATE = Rule(
    name="validate",
    fire=validate,
    opens_with=(Table.STEPS,),
    is_open=lambda tables: (
        tables.steps.has_started and StepState.TRAINED <= tables.progress.state < StepState.VALIDATED
    ),
    reads=(*_WEIGHTS, Table.READY),
)
PUBLISH_CHECKPOINT = Rule(
    name="publish checkpoint",
    fire=publish_checkpoint,
    opens_with=(Table.SAVING,),
    is_open=lambda tables: tables.saving.whole is not None,
    reads=(Table.RECORDING,),
)
SAVE = Rule(
    name="save",
    fire=save,
    opens_with=(Table.STEPS, Table.SAVING),
    is_open=lambda tables: tables.saving.copied is not None or (tables.must_save and not tables.saving.is_out),
    reads=(*_WEIGHTS, Table.JOINING),
)
COMMIT = Rule(
    name="commit",
    fire=commit,
    opens_with=(Table.STEPS,),
    is_open=lambda tables: StepState.TRAINED <= tables.progress.state < StepState.COMMITTED,
    reads=(*_WEIGHTS, Table.SAVING),
)
ADVANCE = Rule(
    name="advance",
    fire=advance,
    opens_with=(Table.STEPS,),
    is_open=lambda tables: tables.progress.state is StepState.COMMITTED,
)
DRAW = Rule(
    name="draw",
    fire=draw,
    opens_with=(Table.STEPS,),
    is_open=lambda tables: (
        tables.steps.has_started
        and tables.spec.has_engines
        and not tables.steps.is_interrupted
        and (tables.spec.dynamic_sampling is not None or tables.steps.drawn < tables.newest_step)
    ),
    reads=(Table.READY, Table.ENGINES),
)
ASSIGN = Rule(
    name="assign",
    fire=assign,
    opens_with=(Table.WAITING,),
    is_open=lambda tables: tables.assignment.is_waiting or bool(tables.full),
    reads=(Table.ENGINES, Table.WEIGHTS, Table.STORED),
)
TRAIN = Rule(
    name="train",
    fire=train,
    opens_with=(Table.STEPS,),
    is_open=lambda tables: (
        tables.progress.state is StepState.GENERATING and tables.steps.has_started and not tables.steps.is_interrupted
    ),
    reads=(Table.READY, Table.ENGINES, Table.WEIGHTS, Table.JOINING),
)
FINISH = Rule(
    name="finish",
    fire=finish,
    opens_with=(Table.STEPS,),
    is_open=lambda tables: (
        tables.error is not None
        or (
            tables.progress.state is StepState.COMMITTED
            and tables.steps.has_started
            and (tables.steps.is_interrupted or tables.is_last)
        )
    ),
    reads=(*_WEIGHTS, Table.RECORDING, Table.SAVING),
)

RULES: dict[Mode, tuple[Rule[Tables], ...]] = {
    Mode.SETTING_UP: (SET_UP,),
    Mode.GOING_ON: (
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
    Mode.FAILING: (PUBLISH_CHECKPOINT, FINISH),
}
"""The rules of each mode, in the order in which they are asked."""
