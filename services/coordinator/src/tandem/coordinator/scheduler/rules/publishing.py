"""Weight sync: bring the version that trainers hold to engines that may take it, and verify it.

`publish` is one rule (`rules.command`). It does whatever is possible now, in this order: connect transfer groups anew,
record what is verified, refit engines, ask for digests, compare them.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.common.messages import Refit
from tandem.coordinator.scheduler.engines.table import COMING_BACK, Status
from tandem.coordinator.scheduler.events import Action, Dispatch
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.tables import Tables
from tandem.coordinator.scheduler.weights.version import Weights

_SHARE_OF_TRANSFER = 0.8
"""The share of a refit's deadline for the transfer. The rest is for reporting a failure, with its peer and tensor."""


def publish(tables: Tables) -> list[Action] | None:
    """Take the next possible steps for the version to reach engines and be verified."""
    weights = tables.weights
    actions = [
        *weights.transfer_groups.connect(may_join=weights.is_readable),
        *_finish_record(weights),
        *_refit_engines(weights, tables.is_free),
        *_begin_verifying(weights),
        *_compare(weights, is_service_able=tables.service.is_able),
    ]
    return actions or None


def _refit_engines(weights: Weights, is_free: Callable[[str], bool]) -> list[Action]:
    """Bring engines to the version that trainers hold: all together, or later ones by themselves.

    `is_free` tells whether an engine with an older version may take this one now.
    """
    if not weights.is_readable:
        return []
    if weights.is_begun and not weights.engines.num_having(Status.READY) and weights.num_behind == 0:
        return []
    if not weights.is_begun and weights.spec.is_synchronous and weights.engines.num_having(*COMING_BACK):
        return []  # no engine could go on without them
    able = [name for name in weights.engines.having(Status.READY, Status.HOLDING) if _may_take(weights, name, is_free)]
    takers = weights.transfer_groups.who_get_it_whole(able, weights.version)
    if not takers:
        return []
    now = weights.requests.now
    if weights.is_begun:
        weights.record.deadline = max(weights.record.deadline, now + weights.spec.deadlines.refit)
        return _refit(weights, takers, everybody=False)
    weights.is_begun = True
    quarantined = weights.record.quarantined  # of the version before, which is already recorded
    weights.begin_record(now + weights.spec.deadlines.refit)
    weights.record.quarantined = quarantined
    return _refit(weights, takers, everybody=_is_for_all(weights, takers))


def _may_take(weights: Weights, name: str, is_free: Callable[[str], bool]) -> bool:
    """Tell whether an engine can be refitted: it lacks the version, and its own is verified and no longer needed."""
    engine = weights.engines[name]
    if engine.status is Status.READY:
        return True
    return engine.version < weights.version and engine.is_verified and is_free(name)


def _is_for_all(weights: Weights, takers: list[str]) -> bool:
    """Tell whether a refit includes all engines of the plan."""
    return weights.may_address_all and len(takers) == len(weights.engines)


def _refit(weights: Weights, takers: list[str], *, everybody: bool) -> list[Action]:
    """Have engines receive the version, and other processes send what they need for it."""
    if not takers:
        return []
    senders = weights.transfers.plan.senders
    if not everybody:
        transfer_groups = [
            transfer_group
            for transfer_group in map(weights.transfers.transfer_group_of, takers)
            if transfer_group is not None
        ]
        senders = tuple(
            member for member in senders if any(member in transfer_group.members for transfer_group in transfer_groups)
        )
    joining_engines: tuple[str, ...] = ()
    if weights.transfers.plan.num_bytes_frozen:
        joining_engines = tuple(name for name in takers if not weights.engines[name].has_frozen)
    actions: list[Action] = []
    for process in dict.fromkeys([*senders, *takers]):
        fields = weights.requests.open(process, Phase.REFITTING, weights.remaining_s())
        if process in takers:
            weights.num_behind -= weights.is_behind(weights.engines[process])
            weights.engines.move(weights.engines[process], Status.REFITTING, version=weights.version)
            weights.engines[process].awaited = {fields["command_id"]}
        fields["deadline_s"] *= _SHARE_OF_TRANSFER
        only = () if everybody else tuple(takers)
        weights.transfers.note_refit(fields["command_id"], joining_engines)
        command = Refit(version=weights.version, only=only, joining_engines=joining_engines, **fields)
        actions.append(Dispatch(process=process, command=command))
    return actions


def _begin_verifying(weights: Weights) -> list[Action]:
    """Take digests of a version that has reached every engine it was begun with, while the run goes on."""
    if not weights.is_begun or weights.is_transferred or weights.engines.num_having(Status.REFITTING):
        return []
    if weights.spec.is_synchronous and weights.engines.num_having(Status.READY, *COMING_BACK):
        return []
    weights.is_transferred = True
    weights.record.transferred(weights.requests.now)
    holders = [
        name for name in weights.engines.having(Status.HOLDING) if weights.engines[name].version == weights.version
    ]
    return weights.verify(holders if weights.spec.keeps_copy else [*weights.trainers, *holders])


def _compare(weights: Weights, *, is_service_able: bool) -> list[Action]:
    """Compare the digests of engines once they are all here, unless others are still computing theirs."""
    if not weights.is_transferred or not weights.verification.may_compare or not is_service_able:
        return []
    weights.record.verified(weights.requests.now)
    return weights.verification.compare(
        weights.trainers, weights.version, weights.remaining_s(), has_update=weights.has_update
    )


def _finish_record(weights: Weights) -> list[Action]:
    """Record that the version is in place and verified, once its digests were compared and no comparison is open."""
    is_known = weights.record.digest is not None and weights.record.engines
    if not is_known or weights.is_verifying or not weights.is_everything_verified():
        return []
    done = weights.record
    weights.begin_record(done.deadline)
    return [done.committed(weights.version, weights.transfers.plan, weights.requests.now)]
