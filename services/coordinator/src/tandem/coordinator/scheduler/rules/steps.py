"""The rules of a step: train, offer the weights, validate, commit, save, and begin the next one."""

from __future__ import annotations

from tandem.coordinator.scheduler.events import Action, CommitStep, DispatchBatch, StepValidated
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.rules import generation, losing
from tandem.coordinator.scheduler.steps import StepState
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


def train(tables: SchedulerTables) -> list[Action] | None:
    """Train on the step's groups."""
    progress = tables.progress
    if tables.spec.has_engines:
        of_step = tables.groups.of_step(tables.step, "train")
        if of_step is None or not generation.is_complete(tables, of_step) or not tables.weights.may_step:
            return None
        dynamic = tables.spec.dynamic_sampling
        if dynamic is not None and generation.lacks_groups(tables, of_step, dynamic):
            return None
        if tables.engines_use_devices:
            return None
        tables.groups.take(tables.step, "train")
        if not tables.is_synchronous:
            tables.num_in_store = tables.groups.num_ready_after(tables.step)
    progress.state = StepState.TRAINING
    progress.num_fetches += 1
    tables.weights.withdraw()
    commands = {rank: tables.open(rank, RunPhase.TRAINING) for rank in tables.processes.of_kind["trainer"]}
    return [DispatchBatch(step=tables.step, purpose="train", commands=commands)]


def offer(tables: SchedulerTables) -> list[Action] | None:
    """Have missing samples made again once every rank has answered; if none are, note that the step has trained.

    Then engines may have its weights.
    """
    progress = tables.progress
    if tables.requests.num_for(RunPhase.TRAINING):
        return None
    if progress.missing:
        return losing.make_again(tables)
    if not tables.weights.may_offer:  # which goes on beside the step
        return None
    if tables.unusable:
        losing.forget_unusable(tables)
    progress.state = StepState.TRAINED
    of_step = tables.groups.of_step(progress.number, "train")
    if of_step is not None:
        tables.recording.begin(progress.number, "train", {str(group.engine) for group in of_step.groups})
    if not tables.spec.has_engines or tables.steps.is_interrupted:
        return []
    return tables.weights.offer(progress.number, has_update=progress.has_update)


def validate(tables: SchedulerTables) -> list[Action] | None:
    """Validate a step that has trained, once engines hold its weights, and note when that is done."""
    progress = tables.progress
    if tables.is_refitting:
        return None
    if progress.state is StepState.TRAINED:
        if not _is_validation_due(tables):
            progress.state = StepState.VALIDATED
            return []
        progress.state = StepState.VALIDATING
        if not tables.spec.has_engines:
            commands = {rank: tables.open(rank, RunPhase.VALIDATING) for rank in tables.processes.of_kind["trainer"]}
            return [DispatchBatch(step=tables.step, purpose="validate", commands=commands)]
        return generation.draw_groups(tables, "validate", progress.number, tables.spec.num_validation_groups)
    return _end_validation(tables)


def _is_validation_due(tables: SchedulerTables) -> bool:
    every, step = tables.spec.validate_every, tables.step
    is_periodic = every > 0 and step >= tables.spec.validate_from
    is_due = step == 0 or (is_periodic and (step % every == 0 or tables.is_last))
    is_due |= tables.spec.validate_at_end and tables.is_last
    return is_due and not tables.steps.is_interrupted


def commit(tables: SchedulerTables) -> list[Action] | None:
    """Write to the journal that the step is done."""
    if not tables.may_commit or tables.must_save or tables.saving.copied is not None:
        return None
    tables.progress.state = StepState.COMMITTED
    step = tables.step
    validated = tables.groups.of_step(step, "validate")
    committed = CommitStep(
        step=step,
        version=step,
        seconds=tables.watch.read(tables.requests.now),
        validated=() if validated is None else tuple(record.scored for record in validated.records()),
        metrics={} if tables.is_synchronous else metrics(tables),
    )
    tables.groups.remove(step, "train")
    tables.groups.remove(step, "validate")
    if tables.restored.groups:
        tables.restored.forget(step)
    return [committed]


def advance(tables: SchedulerTables) -> list[Action] | None:
    """Begin the next step."""
    if not tables.steps.has_started or tables.steps.is_interrupted or tables.is_last:
        return None
    tables.steps.begin(tables.step + 1)
    tables.watch.begin_step(tables.requests.now)
    return []


def _end_validation(tables: SchedulerTables) -> list[Action] | None:
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
