"""The rules: each fires when its condition over the tables holds, and they run until none does.

| rule | fires when | and then |
|---|---|---|
| set up | everybody has done what the stage before asked for | build, plan, install, connect |
| let go | nothing is needed any more of an engine that was told to leave | it goes |
| welcome | an engine has joined that the run had not waited for | build it, plan for it |
| publish | trainers hold a version that an engine lacks, and it may take it | refit it, attest it, record |
| discard | an engine is lost or torn, or has made samples of what was not proven | its groups wait again |
| record | a step has trained | rollouts write its samples to the record, beside what follows |
| start | the weights to start from have reached the engines | the first step begins |
| offer | every rank has trained, nobody reads the version before, it is attested | trainers hold, or copy, a new one |
| validate | a step has trained, it is due, and engines hold the new version | groups, or a batch, to evaluate |
| publish checkpoint | a checkpoint is written, and the record has its steps | it gets its name |
| save | it is due, and no checkpoint is being written | copy; write beside what follows |
| commit | trained, validated, copied | the step is in the journal |
| advance | the step in progress is committed | the next one begins |
| draw | a step is at most `max_trajectory_age_steps` ahead of the one in progress | its groups wait |
| assign | an engine that holds a version young enough for a waiting group has room | it generates, or restores |
| train | the step's groups are ready, every version in them is attested, nobody reads weights | every rank trains |
| finish | the last step is committed, and nothing is pending | the run ends |

A rule is a function of the tables. It returns None where it does not fire, and else its actions. These may be none:
then it has changed the tables. The first rule that can fire does, and then all are asked again.

Synchronous training is an age of zero: nothing is generated for a step before the weights of the one before are
published. An algorithm over a data set has no engines, and the rules that need them do not fire.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.coordinator.scheduler.departures import let_go, welcome
from tandem.coordinator.scheduler.ending import finish
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.generation import assign, draw
from tandem.coordinator.scheduler.publishing import publish
from tandem.coordinator.scheduler.regeneration import discard
from tandem.coordinator.scheduler.setting_up import set_up, start
from tandem.coordinator.scheduler.steps import advance, commit, publish_checkpoint, save, validate
from tandem.coordinator.scheduler.tables import Tables
from tandem.coordinator.scheduler.training import offer, train

Rule = Callable[[Tables], list[Action] | None]


def record(tables: Tables) -> list[Action] | None:
    """Have samples of steps that are done written to the record."""
    return tables.recording.run_rule() or None


SETTING_UP: tuple[Rule, ...] = (set_up,)
"""The rules until everything is set up."""
RULES: tuple[Rule, ...] = (
    let_go,
    welcome,
    publish,
    discard,
    record,
    start,
    offer,
    validate,
    publish_checkpoint,
    save,
    commit,
    advance,
    draw,
    assign,
    train,
    finish,
)
"""The rules of a run that goes on."""
FAILING: tuple[Rule, ...] = (publish_checkpoint, finish)
"""The rules of a run that has failed, and only waits for its last checkpoint."""


def run_rules(tables: Tables) -> list[Action]:
    """Run the rules until none fires; return their actions."""
    actions: list[Action] = []
    while (fired := _fire(tables)) is not None:
        actions += fired
    return actions


def _fire(tables: Tables) -> list[Action] | None:
    """Have the first rule fire that does."""
    if tables.finish is not None:
        return None
    rules = FAILING if tables.error is not None else SETTING_UP if tables.stage is not None else RULES
    for rule in rules:
        fired = rule(tables)
        if fired is not None:
            return fired
    return None
