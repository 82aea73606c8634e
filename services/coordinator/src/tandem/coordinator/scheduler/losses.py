"""Who joins, who is lost, and who could not do what it was asked for: what becomes of the run then.

`Membership` (`membership`) says who is there. Here is decided, for each kind of process, what its loss means:

| lost | then |
|---|---|
| rollout | it is replaced: its groups wait again, others go on |
| refit service | it is replaced: another gets the layouts, and weights go on moving meanwhile |
| rollout that was told to leave, or is not ready yet that has joined later | nothing but that: others go on |
| rollout or refit service, of a run that was interrupted | nothing: it is asked for nothing more |
| trainer, or any before everything is set up | this schedule ends, once its last checkpoint is written |

A process that could not carry out an order for a reason of its own (`Failed.expected`), or whose samples trainers could
not use several times in a row, is lost like one that died: it is shut out, and another takes its place. Where that one
fails alike, so would all, and the run ends.

So many are replaced as `max_replacements` says. What follows the end of a schedule is decided by whoever has made it
(`tandem.coordinator.run.terms`): trainers are started again, and there is a new one.

What an order leads to that its process could not carry out depends on what it was for (`take_failure`). An error that
is raised here ends the run (`ending.fail`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.common.errors import CommandFailed, ServiceError, ServiceLost
from tandem.common.messages import Failed, ServiceKind
from tandem.coordinator.scheduler import departures, regeneration
from tandem.coordinator.scheduler.engines import Status
from tandem.coordinator.scheduler.events import Action, Say
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.tables import Tables
from tandem.coordinator.scheduler.transfers import SERVICE

_MOST_UNUSABLE = 3
"""Times in a row that trainers cannot use an engine's samples before it is lost."""


def take_joined(tables: Tables, member: str, kind: ServiceKind) -> list[Action]:
    """Take note of a process; one in the place of an engine that was lost is brought to where the others are."""
    tables.members.add(member, kind)
    publication = tables.publication
    if tables.error is not None:
        return []
    if member in publication.engines and not publication.engines[member].is_vacant:
        return publication.take_replacement(member)
    if kind == "rollout" and tables.stage is not Phase.JOINING:
        publication.arrivals.add(member)
        return [Say(text=f"{member} joins the run, beside those that it began with")]
    return tables.publication.take_service() if tables.publication.service.is_absent and kind == "refit" else []


def take_loss(tables: Tables, member: str, why: str) -> list[Action]:
    """Go on without a process, as far as the run can. Raises `ServiceLost` if it cannot."""
    tables.recording.take_loss(member)
    if tables.stage is None and tables.members.kind(member) is None:
        return []  # it was let go
    if tables.saving.is_awaited_from(member):
        tables.saving.give_up()
    elif tables.error is not None:
        return []
    engine = tables.publication.engines.get(member)
    if member in tables.publication.arrivals:
        return departures.turn_away(tables, member, why)
    if engine is not None and engine.leave_by is not None:
        return departures.depart(tables, engine, why)
    match tables.members.kind(member):
        case "rollout" | "refit" if tables.steps.is_interrupted:
            tables.requests.drop(member)
            return []
        case "rollout" if member in tables.publication.engines:
            return _replace_engine(tables, member, why)
        case "refit" if tables.stage is None:
            return tables.publication.take_loss_of_service(tables.phase.value, why)
        case _:
            raise ServiceLost(member, tables.phase.value, why)


def is_replaceable(tables: Tables, member: str) -> bool:
    """Tell whether a process would be replaced, or done without, if it was lost now."""
    publication = tables.publication
    engine = publication.engines.get(member)
    if member in publication.arrivals or (engine is not None and engine.leave_by is not None):
        return True
    if tables.stage is not None or tables.error is not None or tables.steps.is_interrupted:
        return False
    return publication.replacements.are_left(tables.requests.now) and (
        member in publication.engines or member == SERVICE
    )


def take_failure(tables: Tables, member: str, failed: Failed) -> list[Action]:
    """Do without what a process could not do, or have it done again. Raises `CommandFailed` if the run cannot."""
    request = tables.requests.close(failed.command_id)
    if request is None:
        return []
    if request.phase is Phase.RECORDING:
        return tables.recording.take_failure(failed.command_id, failed.error)
    if member in tables.publication.arrivals:
        return departures.turn_away(tables, member, failed.error)
    if tables.publication.arrivals.is_planned_by(failed.command_id):
        tables.publication.arrivals.refuse_planned(failed.error)
        return []
    if tables.kept.is_restored(failed.command_id):
        return regeneration.make_instead(tables, member, failed)
    is_engine = tables.members.kind(member) == "rollout"
    if request.phase is Phase.REFITTING or (request.phase is Phase.ATTESTING and is_engine):
        tables.publication.take_failure(member, failed, request.phase)
        return []
    if request.phase is Phase.WRITING:
        tables.saving.give_up()
    tables.groups.close_request(failed.command_id)
    is_its_own = not failed.expected
    if is_its_own and is_replaceable(tables, member) and tables.failures.is_new(member, tables.step, failed.error):
        return take_loss(tables, member, f"it failed while {failed.phase}: {failed.error}")
    raise CommandFailed(member, failed.phase, failed.account, is_its_own=is_its_own)


def take_unusable(tables: Tables, missing: Mapping[str, str]) -> list[Action]:
    """Do without engines whose samples trainers could not use several times in a row; `missing` says why not.

    Raises `ServiceError` if it is all engines of several for the same reason, which is not theirs then, and
    `ServiceLost` if the run cannot do without one.
    """
    engines, unusable = tables.publication.engines, tables.unusable
    there = [name for name in engines if engines[name].status is not Status.ABSENT]
    for engine in missing:
        if engine in there:
            unusable[engine] = unusable.get(engine, 0) + 1
    lost = [engine for engine in missing if unusable.get(engine, 0) == _MOST_UNUSABLE]
    if len(lost) == len(there) > 1 and len({*missing.values()}) == 1:
        what = f"samples of all engines could not be used {_MOST_UNUSABLE} times in a row: {missing[lost[0]]}"
        raise ServiceError("coordinator", f"training step {tables.step}", what)
    actions = list[Action]()
    for engine in lost:
        del unusable[engine]
        why = f"its samples could not be used {_MOST_UNUSABLE} times in a row: {missing[engine]}"
        actions += take_loss(tables, engine, why)
    return actions


def _replace_engine(tables: Tables, engine: str, why: str) -> list[Action]:
    """Get a process in the place of an engine; what it had kept and was generating is made again."""
    regeneration.drop_generation(tables, engine)
    tables.groups.forget_stored(engine)
    return tables.publication.take_loss(engine, tables.phase.value, why)
