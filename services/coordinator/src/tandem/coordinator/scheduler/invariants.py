"""The invariants of the scheduler's tables, which tests check after every event."""

from __future__ import annotations

from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.groups.table import GroupState, SampleGroup
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables


def validate(tables: SchedulerTables) -> None:
    """Raise `AssertionError` where the tables contradict each other."""
    if tables.phase is RunPhase.FINISHED:
        assert not len(tables.requests), "no process is waited for when the run is over"
        return
    ready: dict[int, int] = {}
    step = tables.step
    for group in tables.groups:
        _validate_group(tables, group, step)
        of_step = tables.groups.of_step(group.step, group.purpose)
        assert of_step is not None, "a group is in its step"
        assert of_step.groups[group.number] is group, "a group stands at its place in the data order"
        ready[id(of_step)] = ready.get(id(of_step), 0) + (group.state in (GroupState.READY, GroupState.TAKEN))
        assert ready[id(of_step)] <= of_step.num_ready
    if tables.requests.num_for(RunPhase.COPYING):
        assert not tables.engines.num_having(EngineStatus.REFITTING), "no engine reads what is being written"
    _validate_engines(tables)
    _validate_comings_and_goings(tables)
    _validate_step(tables)


def _validate_group(tables: SchedulerTables, group: SampleGroup, step: int) -> None:
    state = group.state
    if state is GroupState.WAITING:
        assert not group.unfinished, f"{_of(group)}: an engine is waited for"
        assert not group.results, f"{_of(group)}: it has results"
    else:
        samples = set(range(group.size.num_samples))
        if state is GroupState.IN_FLIGHT:
            assert group.unfinished, f"{_of(group)}: no sample is waited for"
            accounted = group.unfinished | {*group.results}
            assert accounted == samples, f"{_of(group)}: a sample is neither there nor to come"
            assert group.request in tables.requests, f"{_of(group)}: its engine was not asked for it"
            assert str(group.engine) in tables.engines, f"{_of(group)}: there is no {group.engine}"
        else:
            assert {*group.results} == samples, f"{_of(group)}: samples are missing"
        if state is not GroupState.TAKEN:
            listed = tables.groups.of_engine(str(group.engine), state)
            assert group in listed, f"{_of(group)}: not in its engine's list"
    if group.purpose == "validate":
        assert group.step == step, f"{_of(group)}: the run is in step {step}"
    if group.purpose == "train":
        newest = step + tables.spec.max_trajectory_age_steps
        assert step <= group.step <= newest, f"{_of(group)}: the run is in step {step}"


def _of(group: SampleGroup) -> str:
    return f"group {group.number} of step {group.step} ({group.purpose}), {group.state.value}"


def _validate_engines(tables: SchedulerTables) -> None:
    engines = tables.engines
    are_shared = tables.trainers_use_devices and tables.engines_use_devices
    assert not are_shared, "engines measure the memory of a GPU while trainers work on it"
    assert engines.num_verified == sum(engines[name].is_verified for name in engines), "verified engines are counted"
    for name in engines:
        engine = engines[name]
        assert engine.version <= tables.weights.version, f"{name} holds what no trainer has made"
        assert engine.status is EngineStatus.HOLDING or not engine.is_verified, f"{name}: verified is what is held"
        in_flight = tables.groups.of_engine(name, GroupState.IN_FLIGHT)
        assert tables.groups.num_in_flight(name) == len(in_flight), f"{name}: what is in flight is counted"
        if in_flight:
            may = {EngineStatus.HOLDING, *([EngineStatus.REFITTING] if tables.spec.updates_in_flight else [])}
            assert engine.status in may, f"{name} generates while {engine.status.value}"
        if engine.status is EngineStatus.REFITTING:
            validating = [group for group in in_flight if group.purpose == "validate"]
            assert not validating, f"{name} validates with weights that change"
        waits = engine.status in (EngineStatus.BUILDING, EngineStatus.INSTALLING, EngineStatus.REFITTING)
        assert waits == bool(engine.awaited), f"{name}, {engine.status.value}, waits for {engine.awaited}"
        assert all(request in tables.requests for request in engine.awaited), f"{name} waits for no pending request"


def _validate_comings_and_goings(tables: SchedulerTables) -> None:
    engines = tables.engines
    for name in engines.draining:
        engine = engines[name]
        assert engine.leave_by is not None, f"{name} is listed as leaving"
        if engine.is_vacant:
            assert engine.status is EngineStatus.ABSENT, f"{name} has left, and is {engine.status.value}"
            assert not engines.staying(), f"the place of {name} is vacant, and there is another engine"
            assert len(engines.draining) == 1, f"{name} was not the last to leave"
        if not engines.staying():
            continue
        waiting = [group for group in tables.groups if group.state is GroupState.WAITING and group.engine == name]
        assert not waiting or tables.spec.balance, f"{name} leaves, and groups wait for it"
    if tables.spec.balance is None:
        for group in tables.groups:
            is_waiting = group.state is GroupState.WAITING
            assert not is_waiting or str(group.engine) in engines, f"groups wait for {group.engine}, which has left"
    for name in tables.joining.stages:
        assert name not in engines or engines[name].is_vacant, f"{name} is in the run, and on its way into it"


def _validate_step(tables: SchedulerTables) -> None:
    progress = tables.progress
    taken_groups = [group for group in tables.groups if group.state is GroupState.TAKEN]
    assert all(group.step == tables.step for group in taken_groups), "only the step in progress is trained on"
    if progress.state is StepState.TRAINING and tables.error is None:
        waiting = tables.requests.num_for(RunPhase.TRAINING)
        proves = not tables.weights.may_offer
        assert waiting or proves, "trainers are busy, or the version before is being read or verified"
        assert not tables.requests.num_for(RunPhase.COPYING), "what is being copied does not change"
        assert {group.purpose for group in taken_groups} == ({"train"} if tables.spec.has_engines else set()), (
            "trained on are the step's groups"
        )
