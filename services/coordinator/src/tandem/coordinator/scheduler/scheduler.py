"""The coordinator's decisions: an event changes the tables, and rules run until none fires. Pure.

`Scheduler.handle` takes one event and returns the actions it leads to. It applies the event to the tables, and then the
agenda runs the rules until none fires. It opens no socket, reads no clock (every event carries ``now``), touches no
file and knows no arrays. So a whole run, with every failure in it, is tested as a list of events and actions.
`tandem.coordinator.loop.loop` carries the actions out.

    event ─▶ applied: `losing`, `generation`, `publishing`, ... ─▶ `agenda`: `rules`, until none fires ─▶ actions
                               └──────────── `tables` ───────────────┘

An error on the way ends the run (`start_and_end.fail`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import assert_never

from tandem.common import messages
from tandem.common.errors import ServiceError
from tandem.coordinator.scheduler import events
from tandem.coordinator.scheduler.agenda import RuleAgenda, RuleMode, RuleTables, TableRule
from tandem.coordinator.scheduler.groups.table import RestoredGroups
from tandem.coordinator.scheduler.rules import (
    generation,
    leaving,
    losing,
    publishing,
    regeneration,
    start_and_end,
    steps,
)
from tandem.coordinator.scheduler.rules.order import RULES
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.tables import IsInformative, SchedulerTables


class Scheduler:
    """Decides which engine generates what, when to train, and when weights move."""

    def __init__(
        self,
        spec: RunSpec,
        now: float,
        is_informative: IsInformative = bool,
        first_command_id: int = 1,
        agenda: Callable[
            [Mapping[RuleMode, tuple[TableRule[SchedulerTables], ...]]], RuleAgenda[SchedulerTables]
        ] = RuleAgenda,
    ) -> None:
        """Take the run's spec, and for dynamic sampling the function that tells whether a group is worth training on.

        `first_command_id` is above that of any command in an earlier attempt. `agenda` creates the agenda of rules.
        """
        self.agenda = agenda(RULES)
        self.tables = SchedulerTables(spec, now, is_informative, first_command_id, self.agenda.changes)
        self._may_phase_differ = self.agenda.watch(
            RuleTables.STEPS, RuleTables.SAVING, RuleTables.WEIGHTS, RuleTables.ENGINES, RuleTables.REQUESTS
        )

    def handle(self, event: events.Event) -> list[events.Action]:
        """Take one event; return the actions it leads to, in order."""
        tables = self.tables
        tables.requests.now = event.now
        if tables.finish is not None:
            return []
        try:
            actions = _apply(tables, event)
            actions += self.agenda.run(tables)
        except ServiceError as error:
            actions = start_and_end.fail(tables, error)
            tables.watch.enter(tables.phase, event.now)
        if self._may_phase_differ():
            tables.watch.enter(tables.phase, event.now)
        if not tables.is_synchronous:
            steps.note(tables)
        return actions


def _apply(tables: SchedulerTables, event: events.Event) -> list[events.Action]:
    """Apply an event to the tables; return the actions that follow at once."""
    match event:
        case events.ProcessReplied(process=process, reply=reply):
            return _apply_reply(tables, process, reply)
        case events.ProcessJoined():
            return losing.take_joined(tables, event)
        case events.CommandErred(process=process, failed=failed):
            return losing.take_failure(tables, process, failed)
        case events.ProcessLost(process=process, reason=reason):
            return losing.take_loss(tables, process, reason)
        case events.AwaitedByHand(process=process):
            tables.engines.await_by_hand(process)
            return []
        case events.EngineDraining(process=process):
            return leaving.take_leaving(tables, process)
        case events.PromptsDrawn():
            generation.take_prompts(tables, event)
            return []
        case events.RestoredFound(groups=groups):
            tables.restored = RestoredGroups(groups)
            return []
        case events.TimePassed() if tables.is_all_in_time:
            tables.still_since = math.inf
            return []
        case events.TimePassed():
            return [*losing.check(tables), *regeneration.move_from_slow_engines(tables)]
        case events.StopRequested():
            return start_and_end.interrupt(tables)
        case unhandled:
            assert_never(unhandled)


def _apply_reply(tables: SchedulerTables, process: str, reply: messages.Reply) -> list[events.Action]:
    if reply.command_id not in tables.requests:
        return []  # a repetition, or the answer to a command that was given up
    if isinstance(reply, messages.SamplesFinished):  # a part of an answer
        return generation.take_results(tables, process, reply)
    tables.requests.close(reply.command_id)
    tables.groups.close_request(reply.command_id)
    match reply:
        case messages.SamplesMissing(rollouts=missing):
            tables.progress.missing |= missing
        case messages.Trained(has_update=has_update):
            tables.progress.has_update |= has_update
        case messages.Generated() | messages.CheckpointCopied() | messages.Evaluated():
            pass  # all that matters of it is that it came
        case messages.CheckpointSaved():
            tables.saving.take_written(process)
        case messages.SamplesRecorded():
            return tables.recording.take_recorded(reply)
        case messages.RendezvousOpened():
            publishing.take_reply(tables, process, reply)
            return start_and_end.build_trainers(tables, reply)
        case _:
            if isinstance(reply, messages.EngineBuilt):
                tables.recording.take_built(process)
            return publishing.take_reply(tables, process, reply)
    return []
