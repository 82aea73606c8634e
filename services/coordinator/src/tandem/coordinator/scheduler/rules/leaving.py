"""Draining engines: each gets nothing more, and goes once nothing of its own is needed.

    draining ─▶ finishes its groups ─▶ its samples are trained on, and logged ─▶ let go.
       └─ `leave` seconds later, or lost meanwhile ─▶ others generate again what is not trained on ─▶ let go.

It does not count as lost, and is not replaced. A lost engine that was not replaced in time has left as well, if there
are others to go on. If it was started by hand, and there are enough others, it has left at once. After the last engine
has left, the run waits for another to join. Its place is vacant until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.coordinator.scheduler.engines.table import EngineState, EngineStatus
from tandem.coordinator.scheduler.events import Action, LetGo, TellUser
from tandem.coordinator.scheduler.groups.table import GroupState, SampleGroup
from tandem.coordinator.scheduler.rules import recovery, regeneration
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables

_STAYS = "was told to leave, and stays for what is left of the last step: there is no other"


def take_leaving(tables: SchedulerTables, process: str) -> list[Action]:
    """Stop giving groups to an engine that was told to leave. Let one go at once that is not yet in the table."""
    engines = tables.engines
    if tables.error is not None or tables.steps.is_interrupted:
        return []  # it is let go at the end, which is near
    if process in tables.joining:
        return turn_away(tables, process, "it was told to")
    if tables.stage is not None:
        tables.told_to_leave[process] = None
        return []
    engine = engines.get(process)
    if engine is None or engine.leave_by is not None or engine.status is EngineStatus.ABSENT:
        return []
    if tables.is_last and engines.staying() == [process]:
        if process in tables.told_to_leave:
            return []
        tables.told_to_leave[process] = None
        return [TellUser(text=f"{process} {_STAYS}")]
    engines.begin_to_leave(engine, tables.requests.now + tables.spec.deadlines.leave)
    num_groups = len(_needed(tables, engine.name))
    when = f"when {num_groups} rollout groups of its are trained on" if num_groups else "at once"
    return [TellUser(text=f"{process} was told to leave: it gets nothing more, and goes {when}")]


def let_go(tables: SchedulerTables) -> list[Action] | None:
    """Let draining engines go that can, and reassign the groups that wait for them."""
    engines = tables.engines
    for name in engines.draining:
        actions = _go_on(tables, engines[name])
        if actions is not None:
            return actions
    return None


def check(tables: SchedulerTables) -> list[Action]:
    """Let draining engines go when their time is up, and do without those that were not replaced in time."""
    engines, actions = tables.engines, list[Action]()
    for name in [*engines.draining]:
        engine = engines[name]
        if not engine.is_vacant and engine.leave_by is not None and tables.requests.now > engine.leave_by:
            actions += depart(tables, engine, f"it did not leave within {tables.spec.deadlines.leave:g} s")
    while (lost := recovery.dispensable(tables)) is not None:
        actions += depart(tables, *lost)
    return actions


def depart(tables: SchedulerTables, engine: EngineState, reason: str) -> list[Action]:
    """Let an engine go now. Its groups that were not trained on are generated again."""
    name, engines = engine.name, tables.engines
    groups = tables.groups.of_engine(name, GroupState.IN_FLIGHT, GroupState.READY)
    regeneration.drop_generation(tables, name)
    tables.groups.forget_stored(name)
    tables.recording.take_loss(name)
    is_last = not _list_peers(tables, name)
    recovery.do_without(tables, engine, is_last=is_last)
    tables.processes.remove(name)
    discarded = regeneration.put_back(tables, groups)
    if name in engines:  # for the process that comes in its place
        tables.assignment.withdraw(name)
    else:
        tables.assignment.move(name, engines.staying() or [*engines])
        tables.assignment.forget(name)
    again = f"; {len(groups)} rollout groups of its are made again" if groups else ""
    is_awaited = name in engines
    return [*discarded, LetGo(process=name, reason=reason + again, is_awaited=is_awaited)]


def welcome(tables: SchedulerTables) -> list[Action] | None:
    """Build, and plan for, engines that joined later than the others. Turn away those that cannot join."""
    joining = tables.joining
    while joining.entered:
        tables.assignment.withdraw(joining.entered.pop())
    if not len(joining):
        return None
    if tables.steps.is_interrupted or (tables.is_last and tables.progress.state is StepState.COMMITTED):
        joining.stop()
        return []
    if joining.refused:
        return [action for name, reason in [*joining.refused.items()] for action in turn_away(tables, name, reason)]
    engines, is_service_able = [*tables.engines], tables.is_service_able
    may_build = not tables.trainers_use_devices
    trainers = tables.weights.trainers
    return joining.go_on(trainers, engines, may_build=may_build, is_service_able=is_service_able) or None


def turn_away(tables: SchedulerTables, process: str, reason: str) -> list[Action]:
    """Do without an engine that has joined, and is not ready yet."""
    tables.recording.take_loss(process)
    tables.joining.remove(process)
    tables.processes.remove(process)
    engines = tables.engines
    is_awaited = any(engines[name].is_vacant for name in engines.draining)
    return [LetGo(process=process, reason=reason, is_awaited=is_awaited)]


def _go_on(tables: SchedulerTables, engine: EngineState) -> list[Action] | None:
    name = engine.name
    peers = _list_peers(tables, name)
    staying = tables.engines.staying()
    if staying and tables.assignment.move(name, staying):
        return []
    if engine.is_vacant:
        if not peers:
            return None
        tables.engines.remove(name)
        return []
    if not staying and (stuck := _cannot_be_trained(tables, name)):
        return _hand_back(tables, name, stuck)
    if not peers and tables.is_last and tables.progress.state >= StepState.TRAINED:
        return _stay(tables, engine)
    return depart(tables, engine, "it was told to") if _may_go(tables, engine) else None


def _stay(tables: SchedulerTables, engine: EngineState) -> list[Action]:
    """Keep the last engine to validate and verify the last step, because the run is about to end."""
    tables.engines.stay(engine)
    tables.assignment.withdraw(engine.name)
    tables.told_to_leave[engine.name] = None
    return [TellUser(text=f"{engine.name} {_STAYS}")]


def _list_peers(tables: SchedulerTables, name: str) -> list[str]:
    """Return the other engines, including draining ones."""
    engines = tables.engines
    return [peer for peer in engines if peer != name and not engines[peer].is_vacant]


def _may_go(tables: SchedulerTables, engine: EngineState) -> bool:
    """Tell whether nothing of an engine is needed any more: no sample, no part of the rollout log, no weights."""
    is_busy = engine.status is EngineStatus.REFITTING or tables.recording.is_awaited_from(engine.name)
    return not is_busy and not _needed(tables, engine.name)


def _needed(tables: SchedulerTables, name: str) -> list[SampleGroup]:
    """Return the groups that an engine is generating, or that are ready or may be being fetched by trainers."""
    groups = tables.groups.of_engine(name, GroupState.IN_FLIGHT, GroupState.READY)
    if tables.progress.state is StepState.TRAINING:
        of_step = tables.groups.of_step(tables.step, "train")
        groups += [group for group in ([] if of_step is None else of_step.groups) if group.engine == name]
    return groups


def _cannot_be_trained(tables: SchedulerTables, name: str) -> list[SampleGroup]:
    """Return the groups of an engine for steps that cannot become complete before another engine joins."""
    incomplete = [group.step for group in tables.groups if group.state is GroupState.WAITING]
    if not incomplete:
        return []
    groups = tables.groups.of_engine(name, GroupState.IN_FLIGHT, GroupState.READY)
    return [group for group in groups if group.step >= min(incomplete)]


def _hand_back(tables: SchedulerTables, name: str, groups: Sequence[SampleGroup]) -> list[Action]:
    """Let groups of an engine wait again. It gives up all that it generates."""
    in_flight = tables.groups.of_engine(name, GroupState.IN_FLIGHT)
    actions = [regeneration.stop(tables, name)] if in_flight else []
    regeneration.drop_generation(tables, name)
    tables.assignment.withdraw(name)
    return [*actions, *regeneration.put_back(tables, [*dict.fromkeys([*groups, *in_flight])])]
