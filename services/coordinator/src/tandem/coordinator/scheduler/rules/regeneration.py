"""Regeneration of groups with samples that do not count, cannot be read, or take too long.

A group that waits again is the same group, with the same seeds. Its samples are discarded, also in the rollout log.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.messages import Failed, Purpose
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.events import Action, DiscardSamples, DispatchPrompts, DropRestored, TellUser
from tandem.coordinator.scheduler.groups.assignment import Assigned, BalancedAssignment
from tandem.coordinator.scheduler.groups.table import GroupState, SampleGroup
from tandem.coordinator.scheduler.requests import GENERATION
from tandem.coordinator.scheduler.tables import SchedulerTables


def discard(tables: SchedulerTables) -> list[Action] | None:
    """Discard the samples of engines that no longer count."""
    invalidated = tables.engines.invalidated
    actions: list[Action] = []
    while invalidated:
        engine = invalidated.pop(0)
        groups = tables.groups.of_engine(engine, GroupState.IN_FLIGHT, GroupState.READY)
        if tables.groups.num_in_flight(engine) and tables.engines[engine].status is not EngineStatus.ABSENT:
            actions.append(stop(tables, engine))
        drop_generation(tables, engine)
        tables.assignment.withdraw(engine)
        actions += put_back(tables, groups)
    return actions


def drop_too_old(tables: SchedulerTables, groups: Sequence[SampleGroup]) -> list[Action]:
    """Let groups wait again that were begun with weights too old for their step."""
    tables.num_too_old += len(groups)
    return put_back(tables, groups)


def drop_restored(tables: SchedulerTables, assigned: Assigned) -> list[Action]:
    """Drop restored groups made with the weights of steps that are generated again, which may differ.

    `assigned` are the groups that are generated now, or restored.
    """
    restored_groups = tables.restored
    groups = [group for of_engine in assigned.values() for group in of_engine]
    generated_steps = [group.step for group in groups if group.purpose == "train" and not restored_groups.has(group)]
    dropped = restored_groups.drop_from(min(generated_steps)) if generated_steps else set()
    if not dropped:
        return []
    restored = [
        group
        for group in tables.groups
        if (group.step, group.number) in dropped
        and group.state in (GroupState.IN_FLIGHT, GroupState.READY)
        and restored_groups.is_restored(group.request)
    ]
    return [DropRestored(version=min(generated_steps), num_groups=len(dropped)), *_take_back(tables, restored)]


def make_instead(tables: SchedulerTables, process: str, failed: Failed) -> list[Action]:
    """Generate the groups that could not be restored."""
    tables.groups.close_request(failed.command_id)
    groups = tables.groups.of_engine(process, GroupState.IN_FLIGHT)
    lost = [group for group in groups if group.request == failed.command_id]
    tables.restored.lose(lost)
    return [TellUser(text=f"{failed.error}; they are generated again"), *_take_back(tables, lost)]


def move_from_slow_engines(tables: SchedulerTables) -> list[Action]:
    """Let groups wait again that an engine holds too long while another is idle."""
    stops: list[Action] = []
    moved: list[SampleGroup] = []
    for engine in tables.assignment.overstayed(tables.requests.now):
        moved += tables.groups.of_engine(engine, GroupState.IN_FLIGHT)
        stops.append(stop(tables, engine))
        drop_generation(tables, engine)
    return [*stops, *put_back(tables, moved)]


def drop_generation(tables: SchedulerTables, engine: str) -> None:
    """Stop waiting for the groups that an engine was asked to generate."""
    for request in [*tables.requests.of(engine, *GENERATION)]:
        tables.requests.close(request.command_id)
        tables.groups.close_request(request.command_id)


def put_back(tables: SchedulerTables, groups: Sequence[SampleGroup]) -> list[Action]:
    """Let groups wait again, and discard their samples."""
    numbers: dict[tuple[int, Purpose], list[int]] = {}
    for group in groups:
        numbers.setdefault((group.step, group.purpose), []).append(group.number)
    tables.groups.put_back(groups)
    tables.assignment.put_back(groups)
    engines = tables.engines
    for engine in {str(group.engine) for group in groups if str(group.engine) not in engines}:  # it has left
        tables.assignment.move(engine, engines.staying() or [*engines])
    return [
        DiscardSamples(step=step, purpose=purpose, groups=tuple(discarded))
        for (step, purpose), discarded in numbers.items()
    ]


def stop(tables: SchedulerTables, engine: str) -> Action:
    """Make an engine give up the groups that it generates."""
    group = tables.groups.of_engine(engine, GroupState.IN_FLIGHT)[0]
    fields = tables.requests.notice(tables.spec.deadlines.generate)
    return DispatchPrompts(
        process=engine,
        step=group.step,
        purpose=group.purpose,
        groups=(),
        cancel_before=fields["command_id"],
        **fields,
    )


def _take_back(tables: SchedulerTables, restored: Sequence[SampleGroup]) -> list[Action]:
    """Let groups wait again that were restored, or were to be."""
    if isinstance(tables.assignment, BalancedAssignment):
        for group in restored:
            tables.assignment.finished(str(group.engine), group, len(group.unfinished))
    return put_back(tables, restored)
