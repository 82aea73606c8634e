"""The rules of a step: train, offer the new weights, validate, save, commit, and begin the next one."""

from __future__ import annotations

from tandem.common.errors import ServiceError
from tandem.common.messages import Purpose
from tandem.coordinator.scheduler.events import Action, CommitStep, DispatchBatch, Say, StepValidated
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.rules import generation, losing, regeneration
from tandem.coordinator.scheduler.steps.progress import StepState
from tandem.coordinator.scheduler.tables import Tables


def validate(tables: Tables) -> list[Action] | None:
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
            return dispatch_batches(tables, "validate")
        return generation.draw_groups(tables, "validate", progress.number, tables.spec.num_validation_groups)
    if not _is_evaluated(tables):
        return None
    actions: list[Action] = []
    if tables.spec.has_engines:
        tables.groups.take(tables.step, "validate")
        actions = _record_validation(tables)
    progress.state = StepState.VALIDATED
    return actions


def save(tables: Tables) -> list[Action] | None:
    """Copy what is to be saved on the trainers; then write it while the run goes on."""
    if tables.saving.copied is not None:
        if tables.requests.num_for(Phase.SAVING):
            return None
        return tables.saving.write(tables.processes.of_kind["trainer"])
    if not tables.may_commit or tables.engines_use_devices:
        return None
    tables.steps.saved = tables.step
    return tables.saving.copy(tables.step, tables.processes.of_kind["trainer"])


def publish_checkpoint(tables: Tables) -> list[Action] | None:
    """Publish the written checkpoint, once the rollout log has all of its steps."""
    step = tables.saving.whole
    assert step is not None, "the rule is open"
    if tables.error is None and tables.recording.is_pending(step):
        return None
    return tables.saving.publish()


def commit(tables: Tables) -> list[Action] | None:
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
        metrics={} if tables.spec.is_synchronous else _read_metrics(tables),
    )
    tables.groups.remove(step, "train")
    tables.groups.remove(step, "validate")
    if tables.restored.groups:
        tables.restored.forget(step)
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
    is_periodic = every > 0 and step >= tables.spec.validate_from
    is_due = step == 0 or (is_periodic and (step % every == 0 or tables.is_last))
    is_due |= tables.spec.validate_at_end and tables.is_last
    return is_due and not tables.steps.is_interrupted


def _is_evaluated(tables: Tables) -> bool:
    if not tables.spec.has_engines:
        return not tables.requests.num_for(Phase.VALIDATING)
    of_step = tables.groups.of_step(tables.step, "validate")
    assert of_step is not None, "drawn when validation began"
    return generation.is_complete(tables, of_step)


def _record_validation(tables: Tables) -> list[Action]:
    """Log the samples that the step was validated by."""
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


_MAX_FETCHES = 3
"""The times that trainers may try to fetch the samples of a step from recorded data."""


def train(tables: Tables) -> list[Action] | None:
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
        if not tables.spec.is_synchronous:
            tables.num_in_store = tables.groups.num_ready_after(tables.step)
    progress.state = StepState.TRAINING
    progress.num_fetches += 1
    tables.weights.withdraw()
    return dispatch_batches(tables, "train")


def offer(tables: Tables) -> list[Action] | None:
    """Note that the step has trained once every rank says so. Engines may have the weights."""
    progress = tables.progress
    if tables.requests.num_for(Phase.TRAINING):
        return None
    if progress.missing:
        return _make_again(tables)
    if not tables.weights.may_offer:  # which goes on beside the step
        return None
    if tables.unusable:
        _forget_unusable(tables)
    progress.state = StepState.TRAINED
    of_step = tables.groups.of_step(progress.number, "train")
    if of_step is not None:
        tables.recording.begin(progress.number, "train", {str(group.engine) for group in of_step.groups})
    if not tables.spec.has_engines or tables.steps.is_interrupted:
        return []
    return tables.weights.offer(progress.number, has_update=progress.has_update)


def dispatch_batches(tables: Tables, purpose: Purpose) -> list[Action]:
    """Send every rank its data-parallel shard of the step's batch, to train on or to evaluate."""
    phase = Phase.TRAINING if purpose == "train" else Phase.VALIDATING
    return [
        DispatchBatch(process=rank, step=tables.step, purpose=purpose, **tables.open(rank, phase))
        for rank in tables.processes.of_kind["trainer"]
    ]


def _make_again(tables: Tables) -> list[Action]:
    """Regenerate the samples that trainers could not fetch. No rank has stepped."""
    progress = tables.progress
    missing, progress.missing, progress.state = progress.missing, {}, StepState.GENERATING
    why = "; ".join(f"{engine}: {reason}" for engine, reason in missing.items())
    if not tables.spec.has_engines and progress.num_fetches == _MAX_FETCHES:
        tried = f"{why} ({_MAX_FETCHES} times in this step)"
        raise ServiceError("coordinator", f"training step {progress.number}", f"samples are missing: {tried}")
    tables.weights.resume()
    if tables.steps.is_interrupted:
        tables.abandon_step()
        return []
    if not tables.spec.has_engines:  # recorded samples are still there
        return [Say(text=f"samples of step {tables.step} are missing and are fetched again: {why}")]
    groups = tables.groups.untake(tables.step, "train")
    return [
        Say(text=f"samples of step {tables.step} are missing and are made again: {why}"),
        *regeneration.put_back(tables, [group for group in groups if group.engine in missing]),
        *losing.take_unusable(tables, missing),
    ]


def _forget_unusable(tables: Tables) -> None:
    """Reset the counts of unusable samples for engines with samples that could now be used."""
    of_step = tables.groups.of_step(tables.step, "train")
    for group in () if of_step is None else of_step.groups:
        tables.unusable.pop(str(group.engine), None)
