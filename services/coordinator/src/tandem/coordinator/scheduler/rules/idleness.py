"""The idle time of processes, and the other metrics of a step whose generation may run ahead."""

from __future__ import annotations

from tandem.coordinator.scheduler.phases import RunPhase
from tandem.coordinator.scheduler.tables import SchedulerTables


def note(tables: SchedulerTables) -> None:
    """Note which processes are idle after an event."""
    num_engines, has_started = len(tables.engines), tables.steps.has_started
    busy = tables.requests.num_for(RunPhase.TRAINING, RunPhase.SAVING, RunPhase.COPYING)
    tables.idleness.note(
        tables.requests.now,
        share_of_engines=has_started * (1 - tables.groups.num_generating / max(num_engines, 1)),
        are_trainers_idle=has_started and not busy,
    )


def metrics(tables: SchedulerTables) -> dict[str, float]:
    """Return the idle seconds of the step, and the groups that were ready ahead or too old."""
    num_too_old, tables.num_too_old = tables.num_too_old, 0
    return {
        **tables.idleness.read(tables.requests.now),
        "buffer_size": float(tables.num_in_store),
        "groups_too_old": float(num_too_old),
    }
