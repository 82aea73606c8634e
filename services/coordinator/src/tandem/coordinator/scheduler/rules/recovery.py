"""Recovery of lost or invalidated engines and of the refit service.

    lost ─▶ ABSENT ─▶ JOINED ─▶ BUILDING ─▶ INSTALLING ─▶ CONNECTING ─▶ refitted like any other.
    invalidated ─────────────────────────────────────────────▲

An engine is invalidated when its part of a refit fails, or when its digests differ from the trainers'. It is refitted
once more, and if that fails too, the run ends. A lost engine is replaced. The new process is built, gets its transfer
program, and is brought to the current version while trainers and other engines go on.
"""

from __future__ import annotations

from tandem.common.errors import CommandFailed, DeadlineExceeded
from tandem.common.messages import Failed, Reply
from tandem.coordinator.scheduler.engines.table import EngineState, EngineStatus
from tandem.coordinator.scheduler.engines.transfers import SERVICE
from tandem.coordinator.scheduler.events import Action, ReplaceEngine
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.tables import SchedulerTables
from tandem.coordinator.scheduler.weights import HAS_ARRIVED

_MOST_FAILURES = 2
"""The attempts at one version that may fail before the run does."""


def take_joining(tables: SchedulerTables, process: str, reply: Reply) -> list[Action]:
    """Take a reply about engines that are joining. Bring those that are ready to the state of the others."""
    actions, entering = tables.joining.take_reply(process, reply)
    for name in entering:
        tables.engines.add(name)
        tables.joining.enter(name)
        if tables.weights.state in HAS_ARRIVED:
            tables.weights.expect_one()
    return actions


def take_failure(tables: SchedulerTables, process: str, failed: Failed, phase: RunPhase) -> None:
    """Take the failure of a process in a refit, or of an engine's verification; `phase` tells which.

    The engine is refitted once more. Raises `CommandFailed` at the limit.
    """
    engines = tables.engines
    if not len(engines):
        return
    engine = engines.get(process)
    # In a refit, an engine that only passes weights on fails like any sender.
    if engine is not None and (phase is RunPhase.VERIFYING or failed.command_id in engine.awaited):
        quarantine(tables, engine, failed.phase, failed.account)
        return
    # A sender fails when its receiver does. The receiver says so itself or is lost; only its weights matter.
    times = tables.weights.record.num_failures_to_send
    times[process] = times.get(process, 0) + 1
    if times[process] > (_MOST_FAILURES + tables.spec.max_replacements) * len(engines):
        raise CommandFailed(process, failed.phase, failed.account)


# --- engines ---------------------------------------------------------------------------------------------------------


def replace_engine(tables: SchedulerTables, name: str, doing: str, reason: str) -> list[Action]:
    """Ask for a replacement of a lost engine. Raises `ServiceLost` if too many were lost."""
    engine = tables.engines[name]
    tables.replacements.count(tables.requests.now, name, doing, reason)
    tables.requests.drop(name)
    tables.weights.forget(engine)
    tables.weights.expect_one()
    _vacate(tables, engine)
    return [ReplaceEngine(process=name, reason=reason)]


def build(tables: SchedulerTables) -> list[Action] | None:
    """Build the engines in new processes, in the places of lost ones."""
    if tables.trainers_use_devices:
        return None
    actions: list[Action] = []
    for name in tables.engines.having(EngineStatus.JOINED):
        tables.engines.move(tables.engines[name], EngineStatus.BUILDING)
        build_it = tables.transfers.request_build(name)
        tables.engines[name].awaited = {build_it.command.command_id}
        actions.append(build_it)
    return actions


def go_on(tables: SchedulerTables, engine: EngineState) -> list[Action]:
    """Advance an engine by one status, now that all its requests were answered."""
    match engine.status:
        case EngineStatus.BUILDING:
            tables.engines.move(engine, EngineStatus.INSTALLING)
            installs = tables.transfers.request_install([engine.name])
            engine.awaited = {install.command.command_id for install in installs}
            return [*installs]
        case EngineStatus.INSTALLING:
            tables.engines.move(engine, EngineStatus.CONNECTING)
            return []
        case status:
            raise AssertionError(f"{engine.name} is {status.value} and waits for no answer")


def do_without(tables: SchedulerTables, engine: EngineState, *, is_last: bool) -> None:
    """Do without an engine that leaves. If it was the last, or others got weights from it, another must come."""
    name, weights = engine.name, tables.weights
    tables.requests.drop(name)
    weights.transfer_groups.stop_connecting(name)
    weights.forget(engine)
    tables.engines.trust(name)
    weights.may_address_all = False
    if not is_last and not weights.transfer_groups.has_others(name):
        tables.engines.remove(name)
        return
    _vacate(tables, engine)
    if is_last:
        tables.engines.leave_vacant(engine)


def _vacate(tables: SchedulerTables, engine: EngineState) -> None:
    """Wait for a process in the place of an engine."""
    tables.engines.move(engine, EngineStatus.ABSENT, version=-1)
    engine.awaited = set()
    engine.is_awaited_by_hand = False
    engine.replace_by = tables.requests.now + tables.spec.deadlines.join
    tables.engines.stay(engine)
    tables.weights.transfer_groups.stop_connecting(engine.name)


def quarantine(tables: SchedulerTables, engine: EngineState, doing: str, reason: str) -> None:
    """Refit an engine once more. Raises `CommandFailed` if it has had its second attempt."""
    engine.num_failures += 1
    if engine.num_failures >= _MOST_FAILURES:
        raise CommandFailed(engine.name, doing, reason)
    tables.weights.record.quarantined[engine.name] = reason
    tables.requests.drop(engine.name, RunPhase.REFITTING, RunPhase.VERIFYING)
    tables.weights.forget(engine)
    tables.engines.move(engine, EngineStatus.CONNECTING, version=-1)
    engine.awaited = set()


def overdue(tables: SchedulerTables) -> DeadlineExceeded | None:
    """Return the error for an overdue replacement."""
    engines, allowed_s = tables.engines, tables.spec.deadlines.join
    for name in engines.draining if len(tables.joining) else ():  # nothing waits for it: another joins
        engines[name].replace_by = tables.requests.now + allowed_s
    for name in engines.having(EngineStatus.ABSENT):
        if tables.requests.now > engines[name].replace_by:
            message = f"no process has taken its place within {allowed_s:g} s"
            return DeadlineExceeded(name, EngineStatus.ABSENT.value, message)
    return tables.service.overdue()


def dispensable(tables: SchedulerTables) -> tuple[EngineState, str] | None:
    """Return a lost engine that the others can go on without, and why it is not replaced.

    Either its replacement is overdue, or it was started by hand and enough others are there. One of these may have been
    started in its place before its loss was known.
    """
    engines = tables.engines
    absent = engines.having(EngineStatus.ABSENT)
    num_there = len({*engines.staying()} - {*absent})
    if not num_there:  # as in a run over a data set, which expects no engine
        return None
    is_enough = num_there >= tables.spec.expected["rollout"]
    for name in absent:
        engine = engines[name]
        if engine.is_vacant or tables.weights.transfer_groups.has_others(name):
            continue
        if engine.is_awaited_by_hand and is_enough:
            return engine, "it was lost, and as many others are there as the run began with"
        if tables.requests.now > engine.replace_by:
            return engine, f"it was lost, and no process has taken its place within {tables.spec.deadlines.join:g} s"
    return None


# --- the refit service -----------------------------------------------------------------------------------------------


def replace_service(tables: SchedulerTables, doing: str, reason: str) -> list[Action]:
    """Ask for a replacement of the refit service. Raises `ServiceLost` if too many were lost."""
    tables.replacements.count(tables.requests.now, SERVICE, doing, reason)
    tables.joining.plan_again()
    return tables.service.replace(reason)
