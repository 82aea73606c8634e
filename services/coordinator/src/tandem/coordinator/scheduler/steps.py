"""The end of a step: it is validated, saved and committed, and the next one begins."""

from __future__ import annotations

from tandem.coordinator.scheduler import generation, training
from tandem.coordinator.scheduler.events import Action, CommitStep, StepValidated
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.tables import Tables


def validate(tables: Tables) -> list[Action] | None:
    """Validate a step that has trained, once engines hold its weights; see when that is done."""
    progress = tables.progress
    if tables.is_refitting:
        return None
    if not progress.is_validating:
        progress.is_validating = _is_validation_due(tables)
        progress.is_validated = not progress.is_validating
        if not progress.is_validating:
            return []
        if not tables.spec.has_engines:
            return training.dispatch_batches(tables, "validate")
        return generation.draw_groups(tables, "validate", progress.number, tables.spec.num_validation_groups)
    if not _is_evaluated(tables):
        return None
    actions: list[Action] = []
    if tables.spec.has_engines:
        tables.groups.take(tables.step, "validate")
        actions = _record_validation(tables)
    progress.is_validating, progress.is_validated = False, True
    return actions


def save(tables: Tables) -> list[Action] | None:
    """Have trainers copy what is to be saved; then have them write it, beside what follows."""
    if tables.saving.is_copied:
        if tables.requests.num_for(Phase.SAVING):
            return None
        return tables.saving.write(tables.members.all("trainer"))
    if not tables.may_commit:
        return None
    tables.steps.saved = tables.step
    return tables.saving.copy(tables.step, tables.members.all("trainer"))


def publish_checkpoint(tables: Tables) -> list[Action] | None:
    """Publish the checkpoint that is written, once the record has all steps that it is made of."""
    step = tables.saving.whole
    assert step is not None, "the rule is open"
    if tables.error is None and tables.recording.is_pending(step):
        return None
    return tables.saving.publish()


def commit(tables: Tables) -> list[Action] | None:
    """Have the step written to the journal: now it is done."""
    if not tables.may_commit or tables.must_save or tables.saving.is_copied:
        return None
    tables.progress.is_committed = True
    step = tables.step
    validated = tables.groups.of_step(step, "validate")
    committed = CommitStep(
        step=step,
        version=step,
        seconds=tables.watch.read(tables.requests.now),
        validated=() if validated is None else tuple(record.scored for record in validated.records()),
        metrics={} if tables.spec.is_synchronous else _read_metrics(tables),
    )
    tables.groups.remove(step, "train")
    tables.groups.remove(step, "validate")
    tables.kept.forget(step)
    return [committed]


def advance(tables: Tables) -> list[Action] | None:
    """Begin the next step."""
    if not tables.steps.has_started or tables.steps.is_interrupted or tables.is_last:
        return None
    tables.steps.begin(tables.step + 1)
    tables.watch.begin_step(tables.requests.now)
    return []


def _is_validation_due(tables: Tables) -> bool:
    every, step = tables.spec.validate_every, tables.step
    is_due = step == 0 or (every > 0 and (step % every == 0 or tables.is_last))
    is_due |= tables.spec.validate_at_end and tables.is_last
    return is_due and not tables.steps.is_interrupted


def _is_evaluated(tables: Tables) -> bool:
    if not tables.spec.has_engines:
        return not tables.requests.num_for(Phase.VALIDATING)
    of_step = tables.groups.of_step(tables.step, "validate")
    assert of_step is not None, "drawn when validation began"
    return generation.is_complete(tables, of_step)


def _record_validation(tables: Tables) -> list[Action]:
    """Have the samples recorded that the step was validated by."""
    of_step = tables.groups.of_step(tables.step, "validate")
    records = () if of_step is None else tuple(of_step.records())
    if not tables.recording.begin(tables.step, "validate", {record.rollout for record in records}):
        return []
    return [StepValidated(step=tables.step, records=records)]


def _read_metrics(tables: Tables) -> dict[str, float]:
    num_too_old, tables.num_too_old = tables.num_too_old, 0
    return {
        **tables.idleness.read(tables.requests.now),
        "buffer_size": float(tables.num_in_store),
        "groups_too_old": float(num_too_old),
    }
