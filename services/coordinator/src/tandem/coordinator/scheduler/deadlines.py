"""Deadlines: who is late is given up, or ends the run with an error that names it."""

from __future__ import annotations

import math

from tandem.common.errors import DeadlineExceeded, ServiceError, Standstill
from tandem.coordinator.scheduler import departures, losses
from tandem.coordinator.scheduler.engines import Status
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.groups import GroupState
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.tables import Tables

_STANDSTILL_S = 10.0
"""How long nobody may be asked for anything before the run fails."""


def check(tables: Tables) -> list[Action]:
    """Give up what is late and not needed. Raise `DeadlineExceeded` for the first other request, or process."""
    allowed_s = tables.spec.deadlines.join
    if tables.stage is Phase.JOINING and tables.watch.in_phase(tables.requests.now) > allowed_s:
        what = f"{tables.members.missing()} did not join within {allowed_s:g} s"
        raise DeadlineExceeded("coordinator", "waiting for processes to join", what)
    given_up = [*_check_requests(tables), *departures.check(tables)]
    if tables.full and _is_stuck(tables):
        raise ServiceError(
            next(iter(tables.full)),
            Phase.GENERATING.value,
            f"it can keep {tables.spec.max_stored_tokens} tokens, and a step needs more before it can be trained on: "
            "raise policy.generation.max_stored_tokens, or have more engines",
        )
    not_replaced = tables.publication.overdue()
    if not_replaced is not None:
        raise not_replaced
    _check_standstill(tables)
    return given_up


def _check_requests(tables: Tables) -> list[Action]:
    """Give up parts of the record that are late, and processes that can be replaced: such a one hangs.

    Raise `DeadlineExceeded` for the first other request.
    """
    given_up = tables.recording.give_up_late()
    while (late := tables.requests.overdue()) is not None:
        no_answer = f"no answer within {late.allowed_s:g} s"
        if late.phase is Phase.RECORDING:
            tables.requests.close(late.command_id)
            given_up += tables.recording.take_failure(late.command_id, no_answer)
        elif losses.is_replaceable(tables, late.member):
            given_up += losses.take_loss(tables, late.member, f"{no_answer} ({late.phase.value})")
        else:
            if late.phase is Phase.WRITING:
                tables.saving.give_up()
            raise DeadlineExceeded(late.member, late.phase.value, no_answer)
    return given_up


def _is_stuck(tables: Tables) -> bool:
    """Tell whether nothing is going on that could make room."""
    progress, engines = tables.progress, tables.publication.engines
    is_trained_on = progress.is_training or progress.is_trained
    return (
        not is_trained_on
        and not tables.requests.num_for(Phase.GENERATING)
        and tables.publication.is_settled
        and engines.num_having(Status.HOLDING) == len(engines) > 0
    )


def _check_standstill(tables: Tables) -> None:
    """Raise `Standstill` if nobody has been asked for anything for a while: no event would ever come."""
    now = tables.requests.now
    is_replaced = tables.publication.engines.num_having(Status.ABSENT) or tables.publication.service.is_absent
    is_awaited = len(tables.requests) or tables.recording.is_waiting or is_replaced
    if is_awaited or tables.stage is not None:
        tables.still_since = math.inf
        return
    tables.still_since = min(tables.still_since, now)
    if now - tables.still_since > _STANDSTILL_S:
        waiting = sum(group.state is GroupState.WAITING for group in tables.groups)
        raise Standstill(
            "coordinator",
            f"step {tables.step}, {tables.phase.value}",
            f"nobody is asked for anything, {waiting} rollout groups wait, and no rule fires: a mistake of "
            "Tandem's, which the journal in the run folder helps to find; --resume goes on",
        )
