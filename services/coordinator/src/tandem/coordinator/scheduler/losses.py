"""Who joins, who is lost, and who could not do what it was asked for: what becomes of the run then.

`Membership` (`membership`) says who is there. Here is decided, for each kind of process, what its loss means:

| lost | then |
|---|---|
| rollout | it is replaced, at most `max_replacements` times: its groups wait again, others go on |
| rollout of a run that was interrupted | nothing: it is asked for nothing more |
| any other, or a rollout before everything is set up | the run ends, once its last checkpoint is written |

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


def take_joined(tables: Tables, member: str, kind: ServiceKind) -> list[Action]:
    """Take note of a process; one in the place of an engine that was lost is brought to where the others are."""
    tables.members.add(member, kind)
    is_wanted = member in tables.publication.engines and tables.error is None
    return tables.publication.take_replacement(member) if is_wanted else []


def take_loss(tables: Tables, member: str, why: str) -> list[Action]:
    """Go on without a process, as far as the run can. Raises `ServiceLost` if it cannot."""
    tables.recording.take_loss(member)
    if tables.saving.is_awaited_from(member):
        tables.saving.give_up()
    elif tables.error is not None:
        return []
    match tables.members.kind(member):
        case "rollout" if tables.is_interrupted:
            tables.requests.drop(member)
            return []
        case "rollout" if member in tables.publication.engines:
            return _replace_engine(tables, member, why)
        case _:
            raise ServiceLost(member, tables.phase.value, why)


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
