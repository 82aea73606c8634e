"""Recovery of lost or invalidated engines and of the refit service.

An engine is invalidated when its part of a refit fails, or when its digests differ from the trainers'. It is refitted
once more, and if that fails too, the run ends. A lost engine is replaced. The new process is built, gets its transfer
program, and is brought to the current version while trainers and other engines go on.
"""

from __future__ import annotations

from tandem.common.errors import CommandFailed, DeadlineExceeded
from tandem.common.messages import Failed, Reply
from tandem.coordinator.scheduler.engines.joining import MOST_FAILURES
from tandem.coordinator.scheduler.engines.table import Engine, Status
from tandem.coordinator.scheduler.engines.transfers import SERVICE
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.tables import Tables
from tandem.coordinator.scheduler.weights.version import HAS_ARRIVED


def take_joining(tables: Tables, process: str, reply: Reply) -> list[Action]:
    """Take a reply about engines that are joining. Bring those that are ready to the state of the others."""
    actions, entering = tables.joining.take_reply(process, reply)
    for name in entering:
        tables.engines.add(name)
        tables.joining.enter(name)
        if tables.weights.state in HAS_ARRIVED:
            tables.weights.expect_one()
    return actions


def take_failure(tables: Tables, process: str, failed: Failed, phase: Phase) -> None:
    """Take the failure of a process in a refit, or of an engine's verification; `phase` tells which.

    The engine is refitted once more. Raises `CommandFailed` at the limit.
    """
    engines = tables.engines
    if not len(engines):
        return
    engine = engines.get(process)
    # In a refit, an engine that only passes weights on fails like any sender.
    if engine is not None and (phase is Phase.VERIFYING or failed.command_id in engine.awaited):
        quarantine(tables, engine, failed.phase, failed.account)
        return
    # A sender fails when its receiver does. The receiver says so itself or is lost; only its weights matter.
    times = tables.weights.record.num_failures_to_send
    times[process] = times.get(process, 0) + 1
    if times[process] > (MOST_FAILURES + tables.spec.max_replacements) * len(engines):
        raise CommandFailed(process, failed.phase, failed.account)


# --- engines ---------------------------------------------------------------------------------------------------------


def replace_engine(tables: Tables, name: str, doing: str, why: str) -> list[Action]:
    """Ask for a replacement of a lost engine. Raises `ServiceLost` if too many were lost."""
    engine = tables.engines[name]
    tables.replacements.count(tables.requests.now, name, doing, why)
    tables.requests.drop(name)
    tables.weights.forget(engine)
    tables.weights.expect_one()
    return tables.recovery.replace(engine, why)


def build(tables: Tables) -> list[Action] | None:
    """Build the engines in new processes, in the places of lost ones."""
    return None if tables.trainers_use_devices else tables.recovery.build()


def do_without(tables: Tables, engine: Engine, *, is_last: bool) -> None:
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
    tables.recovery.vacate(engine)
    if is_last:
        tables.engines.leave_vacant(engine)


def quarantine(tables: Tables, engine: Engine, doing: str, why: str) -> None:
    """Refit an engine once more. Raises `CommandFailed` if it has had its second attempt."""
    tables.recovery.count_failure(engine, doing, why)
    tables.weights.record.quarantined[engine.name] = why
    tables.requests.drop(engine.name, Phase.REFITTING, Phase.VERIFYING)
    tables.weights.forget(engine)
    tables.recovery.refit_again(engine)


def overdue(tables: Tables) -> DeadlineExceeded | None:
    """Return the error for an overdue replacement."""
    engines = tables.engines
    for name in engines.draining if len(tables.joining) else ():  # nothing waits for it: another joins
        engines[name].replace_by = tables.requests.now + tables.spec.deadlines.join
    return tables.recovery.overdue() or tables.service.overdue()


def dispensable(tables: Tables) -> tuple[Engine, str] | None:
    """Return a lost engine that the others can go on without, and why it is not replaced.

    Either its replacement is overdue, or it was started by hand and enough others are there. One of these may have been
    started in its place before its loss was known.
    """
    engines = tables.engines
    absent = engines.having(Status.ABSENT)
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
        if tables.recovery.is_overdue(engine):
            return engine, f"it was lost, and no process has taken its place within {tables.spec.deadlines.join:g} s"
    return None


# --- the refit service -----------------------------------------------------------------------------------------------


def replace_service(tables: Tables, doing: str, why: str) -> list[Action]:
    """Ask for a replacement of the refit service. Raises `ServiceLost` if too many were lost."""
    tables.replacements.count(tables.requests.now, SERVICE, doing, why)
    tables.joining.plan_again()
    return tables.service.replace(why)


def take_service(tables: Tables) -> list[Action]:
    """Tell the replacement of the refit service what it has to know."""
    return tables.service.take_joined(tables.weights.trainers, [*tables.engines, *tables.joining.planned()])
