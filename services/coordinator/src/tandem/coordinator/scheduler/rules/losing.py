"""Processes that join, are lost, fail or are late, and missing samples: what the run does then.

A process that dies, or is shut out, is lost.

`JoinedProcesses` (`engines.processes`) knows which processes are there. This module decides what follows from a loss.

| lost | then |
|---|---|
| rollout | it is replaced: its groups wait again, others go on |
| refit service | it is replaced: another gets the layouts, and weights go on moving meanwhile |
| rollout that is draining, or that joined later and is not ready | nothing else: others go on |
| rollout or refit service of an interrupted run | nothing: it is not needed any more |
| trainer, or any process before everything is set up | the attempt ends, once its last checkpoint is written |

A process counts as lost if it could not carry out a command for a reason of its own (`Failed.expected`), or if trainers
could not use its samples several times in a row. It is shut out, and another takes its place. If the replacement fails
in the same way, the run ends, since all others would, too.

At most `max_replacements` processes are replaced. What follows the end of an attempt is decided in
`tandem.coordinator.loop.run`: trainers are started again, and a new attempt begins.

What follows from a failed command depends on its phase (`take_failure`). An error that is raised here ends the run
(`start_and_end.fail`).

A late process or request is given up, or ends the run with an error that names it (`check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tandem.common.errors import CommandFailed, DeadlineExceeded, ServiceError, ServiceLost, Standstill
from tandem.common.messages import Failed
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.engines.transfers import SERVICE
from tandem.coordinator.scheduler.events import Action, ProcessJoined, TellUser
from tandem.coordinator.scheduler.groups.table import GroupState
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.rules import leaving, recovery, regeneration
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables

_MOST_UNUSABLE = 3
"""The times in a row that trainers cannot use an engine's samples before it counts as lost."""


def take_joined(tables: SchedulerTables, joined: ProcessJoined) -> list[Action]:
    """Note a process that has joined. One in the place of a lost engine is brought to the state of the others."""
    process, kind, engines = joined.process, joined.kind, tables.engines
    tables.processes.add(process, kind, joined.public_key)
    if tables.error is not None:
        return []
    if process in engines and not engines[process].is_vacant:
        engines.move(engines[process], EngineStatus.JOINED)
        return []
    if kind == "rollout" and tables.stage is not RunPhase.JOINING:
        tables.joining.add(process)
        return [TellUser(text=f"{process} joins the run, beside those that it began with")]
    if tables.service.is_absent and kind == "refit":
        return tables.service.take_joined(tables.weights.trainers, [*engines, *tables.joining.planned()])
    return []


def take_loss(tables: SchedulerTables, process: str, reason: str) -> list[Action]:
    """Go on without a process, as far as the run can. Raises `ServiceLost` if it cannot."""
    tables.recording.take_loss(process)
    if tables.stage is None and tables.processes.kind(process) is None:
        return []  # it was let go
    if tables.saving.is_awaited_from(process):
        tables.saving.give_up()
    elif tables.error is not None:
        return []
    engine = tables.engines.get(process)
    if process in tables.joining:
        return leaving.turn_away(tables, process, reason)
    if engine is not None and engine.leave_by is not None:
        return leaving.depart(tables, engine, reason)
    match tables.processes.kind(process):
        case "rollout" | "refit" if tables.steps.is_interrupted:
            tables.requests.drop(process)
            return []
        case "rollout" if process in tables.engines:
            return _replace_engine(tables, process, reason)
        case "refit" if tables.stage is None:
            return recovery.replace_service(tables, tables.phase.value, reason)
        case _:
            raise ServiceLost(process, tables.phase.value, reason)


def is_replaceable(tables: SchedulerTables, process: str) -> bool:
    """Tell whether a process would be replaced, or done without, if it was lost now."""
    engines = tables.engines
    engine = engines.get(process)
    if process in tables.joining or (engine is not None and engine.leave_by is not None):
        return True
    if tables.stage is not None or tables.error is not None or tables.steps.is_interrupted:
        return False
    return tables.replacements.are_left(tables.requests.now) and (process in engines or process == SERVICE)


def take_failure(tables: SchedulerTables, process: str, failed: Failed) -> list[Action]:
    """Do without what a process could not do, or have it done again. Raises `CommandFailed` if the run cannot go on."""
    request = tables.requests.close(failed.command_id)
    if request is None:
        return []
    if request.phase is RunPhase.RECORDING:
        return tables.recording.take_failure(failed.command_id, failed.error)
    if process in tables.joining:
        return leaving.turn_away(tables, process, failed.error)
    if failed.command_id == tables.joining.plan_request:
        tables.joining.refuse_planned(failed.error)
        return []
    if tables.restored.is_restored(failed.command_id):
        return regeneration.make_instead(tables, process, failed)
    is_engine = tables.processes.kind(process) == "rollout"
    if request.phase is RunPhase.REFITTING or (request.phase is RunPhase.VERIFYING and is_engine):
        recovery.take_failure(tables, process, failed, request.phase)
        return []
    if request.phase is RunPhase.WRITING:
        tables.saving.give_up()
    tables.groups.close_request(failed.command_id)
    is_its_own = not failed.expected
    if is_its_own and is_replaceable(tables, process) and tables.failures.is_new(process, tables.step, failed.error):
        return take_loss(tables, process, f"it failed while {failed.phase}: {failed.error}")
    raise CommandFailed(process, failed.phase, failed.account, is_its_own=is_its_own)


def take_unusable(tables: SchedulerTables, missing: Mapping[str, str]) -> list[Action]:
    """Do without engines that made unusable samples several times in a row; `missing` has the reasons.

    Raises `ServiceError` if this holds for all of several engines, since the reason is not theirs then. Raises
    `ServiceLost` if the run cannot do without an engine.
    """
    engines, unusable = tables.engines, tables.unusable
    present = [name for name in engines if engines[name].status is not EngineStatus.ABSENT]
    for engine in missing:
        if engine in present:
            unusable[engine] = unusable.get(engine, 0) + 1
    lost = [engine for engine in missing if unusable.get(engine, 0) == _MOST_UNUSABLE]
    if len(lost) == len(present) > 1 and len({*missing.values()}) == 1:
        message = f"samples of all engines could not be used {_MOST_UNUSABLE} times in a row: {missing[lost[0]]}"
        raise ServiceError("coordinator", f"training step {tables.step}", message)
    actions = list[Action]()
    for engine in lost:
        del unusable[engine]
        reason = f"its samples could not be used {_MOST_UNUSABLE} times in a row: {missing[engine]}"
        actions += take_loss(tables, engine, reason)
    return actions


def _replace_engine(tables: SchedulerTables, engine: str, reason: str) -> list[Action]:
    """Replace an engine. The rule `discard` has the groups that it kept and was generating wait for another."""
    regeneration.drop_generation(tables, engine)
    tables.groups.forget_stored(engine)
    return recovery.replace_engine(tables, engine, tables.phase.value, reason)


_STANDSTILL_S = 10.0
"""How long the run may have no pending request before it fails."""


def check(tables: SchedulerTables) -> list[Action]:
    """Give up what is late and not needed. Raise `DeadlineExceeded` for any other late request or process."""
    allowed_s = tables.spec.deadlines.join
    if tables.stage is RunPhase.JOINING and tables.watch.measure_phase(tables.requests.now) > allowed_s:
        message = f"{tables.processes.missing()} did not join within {allowed_s:g} s"
        raise DeadlineExceeded("coordinator", "waiting for processes to join", message)
    given_up = [*_check_requests(tables), *leaving.check(tables)]
    if tables.full and _is_stuck(tables):
        raise ServiceError(
            next(iter(tables.full)),
            RunPhase.GENERATING.value,
            f"it can keep {tables.spec.max_stored_tokens} tokens, and a step needs more before it can be trained on: "
            "raise policy.generation.max_stored_tokens, or have more engines",
        )
    not_replaced = recovery.overdue(tables)
    if not_replaced is not None:
        raise not_replaced
    _check_standstill(tables)
    return given_up


def _check_requests(tables: SchedulerTables) -> list[Action]:
    """Give up late parts of the rollout log, and late processes that can be replaced, since they hang.

    Raise `DeadlineExceeded` for the first other late request.
    """
    given_up = tables.recording.give_up_late()
    while (late := tables.requests.overdue()) is not None:
        no_answer = f"no answer within {late.allowed_s:g} s"
        if late.phase is RunPhase.RECORDING:
            tables.requests.close(late.command_id)
            given_up += tables.recording.take_failure(late.command_id, no_answer)
        elif is_replaceable(tables, late.process):
            given_up += take_loss(tables, late.process, f"{no_answer} ({late.phase.value})")
        else:
            if late.phase is RunPhase.WRITING:
                tables.saving.give_up()
            raise DeadlineExceeded(late.process, late.phase.value, no_answer)
    return given_up


def _is_stuck(tables: SchedulerTables) -> bool:
    """Tell whether nothing is going on that could make room."""
    engines = tables.engines
    return (
        tables.progress.state is StepState.GENERATING
        and not tables.requests.num_for(RunPhase.GENERATING)
        and tables.weights.is_settled
        and engines.num_having(EngineStatus.HOLDING) == len(engines) > 0
    )


def _check_standstill(tables: SchedulerTables) -> None:
    """Raise `Standstill` if no request has been pending for a while, as no event would ever come."""
    now = tables.requests.now
    is_replaced = tables.engines.num_having(EngineStatus.ABSENT) or tables.service.is_absent
    is_awaited = len(tables.requests) or tables.recording.waiting or is_replaced
    if is_awaited or tables.stage is not None:
        tables.still_since = math.inf
        return
    tables.still_since = min(tables.still_since, now)
    if now - tables.still_since > _STANDSTILL_S:
        waiting = sum(group.state is GroupState.WAITING for group in tables.groups)
        raise Standstill(
            "coordinator",
            f"step {tables.step}, {tables.phase.value}",
            f"no request is pending, {waiting} rollout groups wait, and no rule fires: a bug in Tandem, "
            "which the journal in the run folder helps to find; --resume goes on",
        )


_MAX_FETCHES = 3
"""The times that trainers may try to fetch the samples of a step from recorded data."""


def make_again(tables: SchedulerTables) -> list[Action]:
    """Regenerate the samples that trainers could not fetch. No rank has stepped."""
    progress = tables.progress
    missing, progress.missing, progress.state = progress.missing, {}, StepState.GENERATING
    reasons = "; ".join(f"{engine}: {reason}" for engine, reason in missing.items())
    if not tables.spec.has_engines and progress.num_fetches == _MAX_FETCHES:
        tried = f"{reasons} ({_MAX_FETCHES} times in this step)"
        raise ServiceError("coordinator", f"training step {progress.number}", f"samples are missing: {tried}")
    tables.weights.resume()
    if tables.steps.is_interrupted:
        tables.abandon_step()
        return []
    if not tables.spec.has_engines:  # recorded samples are still there
        return [TellUser(text=f"samples of step {tables.step} are missing and are fetched again: {reasons}")]
    groups = tables.groups.untake(tables.step, "train")
    return [
        TellUser(text=f"samples of step {tables.step} are missing and are made again: {reasons}"),
        *regeneration.put_back(tables, [group for group in groups if group.engine in missing]),
        *take_unusable(tables, missing),
    ]


def forget_unusable(tables: SchedulerTables) -> None:
    """Reset the counts of unusable samples for engines with samples that could now be used."""
    of_step = tables.groups.of_step(tables.step, "train")
    for group in () if of_step is None else of_step.groups:
        tables.unusable.pop(str(group.engine), None)
