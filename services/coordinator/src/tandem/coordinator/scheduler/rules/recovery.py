"""Recovery of lost or invalidated engines and of the refit service, and replies about weights.

An engine is invalidated when its part of a refit fails, or when its digests differ from the trainers'. It is refitted
once more, and if that fails too, the run ends. A lost engine is replaced. The new process is built, gets its transfer
program, and is brought to the current version while trainers and other engines go on.
"""

from __future__ import annotations

from tandem.common.errors import CommandFailed, DeadlineExceeded
from tandem.common.messages import DigestsReported, Failed, Reply, TransfersPlanned, VersionCommitted, WeightsCopied
from tandem.coordinator.scheduler.engines.joining import MOST_FAILURES
from tandem.coordinator.scheduler.engines.table import Engine, Status
from tandem.coordinator.scheduler.engines.transfers import SERVICE
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.tables import Tables

# --- replies ---------------------------------------------------------------------------------------------------------


def take_reply(tables: Tables, process: str, reply: Reply) -> list[Action]:
    """Take a reply to a pending request about weights or their set-up."""
    if process in tables.joining or tables.joining.is_planned_by(reply.command_id):
        actions, entering = tables.joining.take_reply(process, reply)
        for name in entering:
            _enter(tables, name)
        return actions
    weights = tables.weights
    tables.transfers.take(process, reply)
    match reply:
        case DigestsReported(digests=digests):
            weights.verification.take_digests(process, digests)
        case WeightsCopied(digests=digests):
            weights.take_copied(process, digests)
        case VersionCommitted():
            _take_committed(tables, reply)
        case TransfersPlanned() if weights.version >= 0:  # from a replacement of the refit service
            weights.take_service()
        case _:
            return _take_answer(tables, process, reply)
    return []


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


def _take_answer(tables: Tables, process: str, reply: Reply) -> list[Action]:
    """Advance an engine by one status if no other answer of it is awaited."""
    engine = tables.engines.get(process)
    is_of_group = tables.weights.transfer_groups.take_reply(reply.command_id)
    if is_of_group or engine is None or reply.command_id not in engine.awaited:
        return []
    engine.awaited.discard(reply.command_id)
    if engine.awaited:
        return []
    if engine.status is not Status.REFITTING:
        return tables.recovery.go_on(engine)
    tables.engines.move(engine, Status.HOLDING)
    engine.has_frozen = True
    return tables.weights.verify([engine.name]) if tables.weights.is_transferred else []


def _take_committed(tables: Tables, reply: VersionCommitted) -> None:
    """Take the result of the refit service: the engines that are verified, and those that differ."""
    record = tables.weights.record
    verified, differing = tables.weights.verification.take_compared(reply)
    record.engines += [engine.name for engine in verified]
    for engine in differing:
        what = f"it does not hold version {reply.version}: {reply.differing[engine.name]}"
        quarantine(tables, engine, Phase.VERIFYING.value, what)
    record.digest = reply.digest


def _enter(tables: Tables, name: str) -> None:
    """Bring an engine that has joined to the state of the others."""
    tables.engines.add(name)
    tables.joining.enter(name)
    if tables.weights.is_transferred:
        tables.weights.expect_one()


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
    for name in engines.leaving() if len(tables.joining) else ():  # nothing waits for it: another joins
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
    return tables.service.take_joined(tables.weights.trainers, [*tables.engines.names(), *tables.joining.planned()])
