"""The end of a step's validation, and the log of the samples that it was validated by."""

from __future__ import annotations

from tandem.coordinator.scheduler.events import Action, StepValidated
from tandem.coordinator.scheduler.phases import RunPhase
from tandem.coordinator.scheduler.rules import generation
from tandem.coordinator.scheduler.steps.progress import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables


def end(tables: SchedulerTables) -> list[Action] | None:
    """Note that the step is validated, once its groups, or its batch, are evaluated."""
    if not _is_evaluated(tables):
        return None
    actions: list[Action] = []
    if tables.spec.has_engines:
        tables.groups.take(tables.step, "validate")
        actions = _record_validation(tables)
    tables.progress.state = StepState.VALIDATED
    return actions


def _is_evaluated(tables: SchedulerTables) -> bool:
    if not tables.spec.has_engines:
        return not tables.requests.num_for(RunPhase.VALIDATING)
    of_step = tables.groups.of_step(tables.step, "validate")
    assert of_step is not None, "drawn when validation began"
    return generation.is_complete(tables, of_step)


def _record_validation(tables: SchedulerTables) -> list[Action]:
    """Log the samples that the step was validated by."""
    of_step = tables.groups.of_step(tables.step, "validate")
    records = () if of_step is None else tuple(of_step.records())
    if not tables.recording.begin(tables.step, "validate", {record.rollout for record in records}):
        return []
    return [StepValidated(step=tables.step, records=records)]
