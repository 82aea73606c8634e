"""Weight sync: bring the version that trainers hold to engines that may take it, and verify it.

`publish` is a rule (`scheduler.RULES`). It does whatever is possible now, in this order: connect transfer groups anew,
record what is verified, refit engines, ask for digests, compare them. `take_reply` takes what processes answer to that.
"""

from __future__ import annotations

from tandem.common import messages
from tandem.coordinator.scheduler.engines.table import COMING_BACK, EngineStatus
from tandem.coordinator.scheduler.events import Action, DispatchCommand
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.rules import recovery
from tandem.coordinator.scheduler.tables import SchedulerTables
from tandem.coordinator.scheduler.weights import HAS_ARRIVED, READABLE, VersionState

_SHARE_OF_TRANSFER = 0.8
"""The share of a refit's deadline for the transfer. The rest is for reporting a failure, with its peer and tensor."""


def publish(tables: SchedulerTables) -> list[Action] | None:
    """Take the next possible steps for the version to reach engines and be verified."""
    weights = tables.weights
    is_readable = weights.state in READABLE
    actions: list[Action] = []
    if tables.engines.num_having(EngineStatus.CONNECTING):
        actions += weights.transfer_groups.connect(may_join=is_readable)
    if weights.record.engines:
        actions += _finish_record(tables)
    if is_readable:
        actions += _refit_engines(tables)
    if weights.state is VersionState.UNDER_WAY:
        actions += _begin_verifying(tables)
    if weights.state in HAS_ARRIVED and not weights.verification.awaited and tables.is_service_able:
        actions += _compare(tables)
    return actions or None


def _refit_engines(tables: SchedulerTables) -> list[Action]:
    """Bring engines to the version that trainers hold: all together, or later ones by themselves."""
    engines, weights = tables.engines, tables.weights
    is_begun = weights.state is not VersionState.OFFERED
    if is_begun and not engines.num_having(EngineStatus.READY) and weights.num_behind == 0:
        return []
    if not is_begun and tables.is_synchronous and engines.num_having(*COMING_BACK):
        return []  # no engine could go on without them
    takers = [name for name in engines.having(EngineStatus.READY, EngineStatus.HOLDING) if _may_take(tables, name)]
    if tables.transfers.plan.transfer_groups:
        takers = weights.transfer_groups.who_get_it_whole(takers, weights.version)
    if not takers:
        return []
    now = tables.requests.now
    if is_begun:
        weights.record.deadline = max(weights.record.deadline, now + tables.spec.deadlines.refit)
        return _refit(tables, takers, everybody=False)
    weights.state = VersionState.UNDER_WAY
    quarantined = weights.record.quarantined  # of the version before, which is already recorded
    weights.begin_record(now + tables.spec.deadlines.refit)
    weights.record.quarantined = quarantined
    return _refit(tables, takers, everybody=weights.may_address_all and len(takers) == len(engines))


def _may_take(tables: SchedulerTables, name: str) -> bool:
    """Tell whether an engine can be refitted: it lacks the version, and its own is verified and no longer needed.

    Where updates may come in flight, only validation still needs it.
    """
    engine, weights = tables.engines[name], tables.weights
    if engine.status is EngineStatus.READY:
        return True
    if engine.version >= weights.version or not engine.is_verified:
        return False
    return not tables.groups.num_in_flight(name, *(("validate",) if tables.spec.updates_in_flight else ()))


def _refit(tables: SchedulerTables, takers: list[str], *, everybody: bool) -> list[Action]:
    """Have engines receive the version, and other processes send what they need for it."""
    engines, weights, plan = tables.engines, tables.weights, tables.transfers.plan
    senders = plan.senders if everybody else tables.transfers.senders_for(takers)
    joining_engines: tuple[str, ...] = ()
    if plan.num_bytes_frozen:
        joining_engines = tuple(name for name in takers if not engines[name].has_frozen)
    whole_engines: tuple[str, ...] = ()
    if tables.spec.sends_differences:
        whole_engines = tuple(name for name in takers if engines[name].status is EngineStatus.READY)
    actions: list[Action] = []
    for process in dict.fromkeys([*senders, *takers]):
        fields = tables.requests.open(process, RunPhase.REFITTING, weights.remaining_s())
        if process in takers:
            weights.num_behind -= weights.is_behind(engines[process])
            engines.move(engines[process], EngineStatus.REFITTING, version=weights.version)
            engines[process].awaited = {fields["command_id"]}
        fields["deadline_s"] *= _SHARE_OF_TRANSFER
        only = () if everybody else tuple(takers)
        if joining_engines:
            weights.verification.note_joining(fields["command_id"], joining_engines)
        command = messages.Refit(
            version=weights.version, only=only, joining_engines=joining_engines, whole=whole_engines, **fields
        )
        actions.append(DispatchCommand(process=process, command=command))
    return actions


def _begin_verifying(tables: SchedulerTables) -> list[Action]:
    """Take digests of a version that has reached every engine it was begun with, while the run goes on."""
    engines, weights = tables.engines, tables.weights
    if engines.num_having(EngineStatus.REFITTING):
        return []
    if tables.is_synchronous and engines.num_having(EngineStatus.READY, *COMING_BACK):
        return []
    weights.state = VersionState.ARRIVED
    weights.record.note("transfer", tables.requests.now)
    holders = [name for name in engines.having(EngineStatus.HOLDING) if engines[name].version == weights.version]
    processes = holders if tables.spec.keeps_copy else [*weights.trainers, *holders]
    return weights.verification.request_digests(processes, weights.version, weights.remaining_s())


def _compare(tables: SchedulerTables) -> list[Action]:
    """Compare the digests of engines once they are all here, unless others are being compared."""
    weights = tables.weights
    if weights.verification.comparing is not None or not tables.engines.are_any_unverified:
        return []
    weights.record.note("verify" if "transfer" in weights.record.seconds else "transfer", tables.requests.now)
    return weights.verification.compare(
        weights.trainers, weights.version, weights.remaining_s(), has_update=weights.has_update
    )


def _finish_record(tables: SchedulerTables) -> list[Action]:
    """Record that the version is in place and verified, once its digests were compared and no comparison is open."""
    weights, record = tables.weights, tables.weights.record
    if record.digest is None or weights.verification.is_going_on or not weights.is_everything_verified:
        return []
    weights.begin_record(record.deadline)
    return [record.committed(weights.version, tables.transfers.plan, tables.requests.now)]


# --- replies ---------------------------------------------------------------------------------------------------------


def take_reply(tables: SchedulerTables, process: str, reply: messages.Reply) -> list[Action]:
    """Take a reply to a pending request about weights or their set-up."""
    if process in tables.joining.stages or reply.command_id == tables.joining.plan_request:
        return recovery.take_joining(tables, process, reply)
    weights = tables.weights
    match reply:
        case messages.Refitted():
            weights.verification.check_bytes(process, reply)
        case messages.DigestsReported(digests=digests):
            weights.verification.take_digests(process, digests)
            return []
        case messages.WeightsCopied(digests=digests):
            weights.take_copied(process, digests)
            return []
        case messages.VersionCommitted():
            _take_committed(tables, reply)
            return []
        case _:
            tables.transfers.take(process, reply)
            if (
                isinstance(reply, messages.TransfersPlanned) and weights.version >= 0
            ):  # from a replacement of the refit service
                weights.take_service()
                return []
    return _take_answer(tables, process, reply)


def _take_answer(tables: SchedulerTables, process: str, reply: messages.Reply) -> list[Action]:
    """Advance an engine by one status if no other answer of it is awaited."""
    groups = tables.weights.transfer_groups
    if groups.connecting and groups.take_reply(reply.command_id):
        return []
    engine = tables.engines.get(process)
    if engine is None or reply.command_id not in engine.awaited:
        return []
    engine.awaited.discard(reply.command_id)
    if engine.awaited:
        return []
    if engine.status is not EngineStatus.REFITTING:
        return recovery.go_on(tables, engine)
    tables.engines.move(engine, EngineStatus.HOLDING)
    engine.has_frozen = True
    weights = tables.weights
    if weights.state not in HAS_ARRIVED:
        return []
    return weights.verification.request_digests([engine.name], weights.version, weights.remaining_s())


def _take_committed(tables: SchedulerTables, reply: messages.VersionCommitted) -> None:
    """Take the result of the refit service: the engines that are verified, and those that differ."""
    verification, record, engines = tables.weights.verification, tables.weights.record, tables.engines
    for name in verification.end_comparison():
        engine = engines.get(name)
        if engine is None:
            continue
        if name in reply.differing:
            reason = f"it does not hold version {reply.version}: {reply.differing[name]}"
            recovery.quarantine(tables, engine, RunPhase.VERIFYING.value, reason)
        else:
            engines.verify(engine, is_verified=True)
            record.engines.append(name)
    record.digest = reply.digest
