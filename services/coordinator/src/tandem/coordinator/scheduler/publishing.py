"""Publishing: bring the version that trainers hold to engines that may take it, and have it proven.

`publish` is one rule of the scheduler's (`rules`), made of what can be done at any time, in this order: connect meshes
anew, record what is proven, refit engines, ask for digests, have them compared.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.common.messages import Refit
from tandem.coordinator.scheduler.engines import COMING_BACK, Status
from tandem.coordinator.scheduler.events import Action, Dispatch
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.publication import Publication
from tandem.coordinator.scheduler.tables import Tables

_SHARE_OF_TRANSFER = 0.8
"""Of a refit's deadline. The rest is for whoever gives up then to say so: that names the peer and the tensor."""


def publish(tables: Tables) -> list[Action] | None:
    """Do what can be done now for the version to reach engines, and to be attested."""
    publication = tables.publication
    actions = [
        *publication.meshes.connect(may_join=publication.is_readable),
        *_finish_record(publication),
        *_refit_engines(publication, tables.is_free),
        *_begin_attesting(publication),
        *_compare(publication),
    ]
    return actions or None


def _refit_engines(publication: Publication, is_free: Callable[[str], bool]) -> list[Action]:
    """Bring engines to the version that trainers hold: all together, or those that come later by themselves.

    `is_free` tells whether an engine that holds an older version may take this one now.
    """
    if not publication.is_readable:
        return []
    if publication.is_begun and not publication.engines.num_having(Status.READY) and publication.num_behind == 0:
        return []
    if not publication.is_begun and publication.spec.is_synchronous and publication.engines.num_having(*COMING_BACK):
        return []  # nobody could go on without them
    able = [
        name
        for name in publication.engines.having(Status.READY, Status.HOLDING)
        if _may_take(publication, name, is_free)
    ]
    takers = publication.meshes.who_get_it_whole(able, publication.version)
    if not takers:
        return []
    now = publication.requests.now
    if publication.is_begun:
        publication.record.deadline = max(publication.record.deadline, now + publication.spec.deadlines.refit)
        return _refit(publication, takers, everybody=False)
    publication.is_begun = True
    quarantined = publication.record.quarantined  # of the version before, and in no record
    publication.begin_record(now + publication.spec.deadlines.refit)
    publication.record.quarantined = quarantined
    return _refit(publication, takers, everybody=_is_for_all(publication, takers))


def _may_take(publication: Publication, name: str, is_free: Callable[[str], bool]) -> bool:
    """Tell whether an engine can be refitted: it lacks the version, and what it holds is done with and attested."""
    engine = publication.engines[name]
    if engine.status is Status.READY:
        return True
    return engine.version < publication.version and engine.is_attested and is_free(name)


def _is_for_all(publication: Publication, takers: list[str]) -> bool:
    """Tell whether a refit is for all that were planned for."""
    return publication.may_address_all and len(takers) == len(publication.engines)


def _refit(publication: Publication, takers: list[str], *, everybody: bool) -> list[Action]:
    """Order engines to receive the version, and others to send what they need for it."""
    if not takers:
        return []
    senders = publication.transfers.plan.senders
    if not everybody:
        meshes = [mesh for mesh in map(publication.transfers.mesh_of, takers) if mesh is not None]
        senders = tuple(member for member in senders if any(member in mesh.members for mesh in meshes))
    newcomers: tuple[str, ...] = ()
    if publication.transfers.plan.num_bytes_frozen:
        newcomers = tuple(name for name in takers if not publication.engines[name].has_frozen)
    actions: list[Action] = []
    for member in dict.fromkeys([*senders, *takers]):
        fields = publication.requests.open(member, Phase.REFITTING, publication.remaining_s())
        if member in takers:
            publication.num_behind -= publication.is_behind(publication.engines[member])
            publication.engines.move(publication.engines[member], Status.REFITTING, version=publication.version)
            publication.engines[member].awaited = {fields["command_id"]}
        fields["deadline_s"] *= _SHARE_OF_TRANSFER
        only = () if everybody else tuple(takers)
        publication.transfers.note_refit(fields["command_id"], newcomers)
        order = Refit(version=publication.version, only=only, newcomers=newcomers, **fields)
        actions.append(Dispatch(member=member, order=order))
    return actions


def _begin_attesting(publication: Publication) -> list[Action]:
    """Have digests taken of a version that has reached every engine it was begun with, beside what follows."""
    if not publication.is_begun or publication.is_transferred or publication.engines.num_having(Status.REFITTING):
        return []
    if publication.spec.is_synchronous and publication.engines.num_having(Status.READY, *COMING_BACK):
        return []
    publication.is_transferred = True
    publication.record.transferred(publication.requests.now)
    holders = [
        name
        for name in publication.engines.having(Status.HOLDING)
        if publication.engines[name].version == publication.version
    ]
    return publication.attest(holders if publication.spec.keeps_copy else [*publication.trainers, *holders])


def _compare(publication: Publication) -> list[Action]:
    """Have the engines attested whose digests are all here, unless others are still computing theirs."""
    if not publication.is_transferred or not publication.attestation.may_compare or not publication.service.is_able:
        return []
    publication.record.attested(publication.requests.now)
    return publication.attestation.compare(
        publication.trainers, publication.version, publication.remaining_s(), has_update=publication.has_update
    )


def _finish_record(publication: Publication) -> list[Action]:
    """Have it recorded where the version is and proven, once digests were compared for it and no other is open."""
    is_known = publication.record.digest is not None and publication.record.engines
    if not is_known or publication.is_attesting or not publication.is_everything_attested():
        return []
    done = publication.record
    publication.begin_record(done.deadline)
    return [done.committed(publication.version, publication.transfers.plan, publication.requests.now)]
