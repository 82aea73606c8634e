"""The rule of streaming training: trainers get a step's first groups while its last are generated.

Only runs with `RunSpec.streaming` have it. What it knows of a step is in a table of its own. No weight changes before
the step's `Train`, which says of every sample what was trained on. A trainer that was given something else computes the
whole gradient again, so that nothing here has to be taken back when a group is.
"""

from __future__ import annotations

from tandem.coordinator.scheduler.agenda import RuleTables, TableRule
from tandem.coordinator.scheduler.events import Action, DispatchGroups
from tandem.coordinator.scheduler.groups.table import GroupState, StepGroups
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables, StreamedGroups


def stream(tables: SchedulerTables) -> list[Action] | None:
    """Have trainers compute the gradient of the groups that are ready, if that makes a batch and they are idle."""
    streaming, of_step = tables.spec.streaming, tables.groups.of_step(tables.step, "train")
    if streaming is None or of_step is None or tables.requests.num_for(RunPhase.TRAINING):
        return None
    if tables.weights.verification.needs_trainers:  # engines wait for that, and take no digest while they compute
        return None
    streamed = tables.streamed
    streamed.begin(tables.step)
    if _is_spoiled(streamed, of_step):
        return None
    groups = [
        group
        for group in of_step.groups
        if group.state is GroupState.READY
        and group.number not in streamed.requests
        and tables.weights.is_proven(str(group.engine), group.newest_version)
    ]
    if len(groups) < streaming.min_groups:
        return None
    streamed.requests |= {group.number: group.request for group in groups}
    commands = {rank: tables.open(rank, RunPhase.TRAINING) for rank in tables.processes.of_kind["trainer"]}
    return [DispatchGroups(step=tables.step, groups=tuple(group.number for group in groups), commands=commands)]


def _is_spoiled(streamed: StreamedGroups, of_step: StepGroups) -> bool:
    """Tell whether a group that trainers were given is made again: they will compute all anew."""
    groups = of_step.groups
    return any(
        groups[number].state is not GroupState.READY or groups[number].request != request
        for number, request in streamed.requests.items()
    )


STREAM = TableRule(
    name="stream",
    fire=stream,
    opens_with=(RuleTables.STEPS,),
    is_open=lambda tables: (
        tables.progress.state is StepState.GENERATING and tables.steps.has_started and not tables.steps.is_interrupted
    ),
    reads=(RuleTables.GROUPS, RuleTables.ENGINES, RuleTables.WEIGHTS, RuleTables.REQUESTS, RuleTables.READY),
)
