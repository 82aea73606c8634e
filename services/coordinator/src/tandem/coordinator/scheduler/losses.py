"""Who joins, who is lost, and who could not do what it was asked for: what becomes of the run then.

`Membership` (`membership`) says who is there. Here is decided, for each kind of process, what its loss means:

| lost | then |
|---|---|
| rollout | it is replaced: its groups wait again, others go on |
| refit service | it is replaced: another gets the layouts, and weights go on moving meanwhile |
| either, of a run that was interrupted | nothing: it is asked for nothing more |
| trainer, or any before everything is set up | this schedule ends, once its last checkpoint is written |

So many are replaced as `max_replacements` says. What follows the end of a schedule is decided by whoever has made it
(`tandem.coordinator.run.terms`): trainers are started again, and there is a new one.

What an order leads to that its process could not carry out depends on what it was for (`take_failure`). An error that
is raised here ends the run (`ending.fail`).
"""

from __future__ import annotations

from tandem.common.errors import CommandFailed, ServiceLost
from tandem.common.messages import Failed, ServiceKind
from tandem.coordinator.scheduler import regeneration
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.tables import Tables
from tandem.coordinator.scheduler.transfers import SERVICE


def take_joined(tables: Tables, member: str, kind: ServiceKind) -> list[Action]:
    """Take note of a process; one in the place of an engine that was lost is brought to where the others are."""
    tables.members.add(member, kind)
    if tables.error is not None:
        return []
    if member in tables.publication.engines:
        return tables.publication.take_replacement(member)
    return tables.publication.take_service() if tables.publication.service.is_absent and kind == "refit" else []


def take_loss(tables: Tables, member: str, why: str) -> list[Action]:
    """Go on without a process, as far as the run can. Raises `ServiceLost` if it cannot."""
    tables.recording.take_loss(member)
    if tables.saving.is_awaited_from(member):
        tables.saving.give_up()
    elif tables.error is not None:
        return []
    match tables.members.kind(member):
        case "rollout" | "refit" if tables.is_interrupted:
            tables.requests.drop(member)
            return []
        case "rollout" if member in tables.publication.engines:
            return _replace_engine(tables, member, why)
        case "refit" if tables.stage is None:
            return tables.publication.take_loss_of_service(tables.phase.value, why)
        case _:
            raise ServiceLost(member, tables.phase.value, why)


def is_replaceable(tables: Tables, member: str) -> bool:
    """Tell whether a process would be replaced if it was lost now, without more ado."""
    publication = tables.publication
    if tables.stage is not None or tables.error is not None or tables.is_interrupted:
        return False
    return publication.replacements.are_left and (member in publication.engines or member == SERVICE)


def take_failure(tables: Tables, member: str, failed: Failed) -> list[Action]:
    """Do without what a process could not do, or have it done again. Raises `CommandFailed` if the run cannot."""
    request = tables.requests.close(failed.command_id)
    if request is None:
        return []
    if request.phase is Phase.RECORDING:
        return tables.recording.take_failure(failed.command_id, failed.error)
    if tables.kept.is_restored(failed.command_id):
        return regeneration.make_instead(tables, member, failed)
    is_engine = tables.members.kind(member) == "rollout"
    if request.phase is Phase.REFITTING or (request.phase is Phase.ATTESTING and is_engine):
        tables.publication.take_failure(member, failed, request.phase)
        return []
    if request.phase is Phase.WRITING:
        tables.saving.give_up()
    raise CommandFailed(member, failed.phase, failed.account)


def _replace_engine(tables: Tables, engine: str, why: str) -> list[Action]:
    """Get a process in the place of an engine; what it had kept and was generating is made again."""
    regeneration.drop_generation(tables, engine)
    tables.groups.forget_stored(engine)
    return tables.publication.take_loss(engine, tables.phase.value, why)
