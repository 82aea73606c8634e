"""The rules of checkpoints: copy what is to be saved, and publish what is written."""

from __future__ import annotations

from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.phases import RunPhase
from tandem.coordinator.scheduler.tables import SchedulerTables


def save(tables: SchedulerTables) -> list[Action] | None:
    """Copy what is to be saved on the trainers; then write it while the run goes on."""
    if tables.saving.copied is not None:
        if tables.requests.num_for(RunPhase.SAVING):
            return None
        return tables.saving.write(tables.processes.of_kind["trainer"])
    if not tables.may_commit or tables.engines_use_devices:
        return None
    tables.steps.saved = tables.step
    return tables.saving.copy(tables.step, tables.processes.of_kind["trainer"])


def publish_checkpoint(tables: SchedulerTables) -> list[Action] | None:
    """Publish the written checkpoint, once the rollout log has all of its steps."""
    step = tables.saving.publishable_step
    assert step is not None, "the rule is open"
    if tables.error is None and tables.recording.is_pending(step):
        return None
    return tables.saving.publish()
