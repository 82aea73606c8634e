"""Training: every rank trains on a step's groups, and then offers engines a version of the weights."""

from __future__ import annotations

from tandem.common.errors import ServiceError
from tandem.common.messages import Purpose
from tandem.coordinator.scheduler import generation, losses, regeneration
from tandem.coordinator.scheduler.events import Action, DispatchBatch, Say
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.tables import Tables

_MAX_FETCHES = 3
"""How often trainers may try to fetch the samples of a step from a record."""


def train(tables: Tables) -> list[Action] | None:
    """Train on the step's groups."""
    progress = tables.progress
    if tables.spec.has_engines:
        of_step = tables.groups.of_step(tables.step, "train")
        if of_step is None or not generation.is_complete(tables, of_step) or not tables.publication.may_step:
            return None
        if generation.lacks_groups(tables, of_step):
            return None
        tables.groups.take(tables.step, "train")
        tables.num_in_store = tables.groups.num_ready_after(tables.step)
    progress.is_training = True
    progress.num_fetches += 1
    tables.publication.withdraw()
    return dispatch_batches(tables, "train")


def offer(tables: Tables) -> list[Action] | None:
    """Take the step as trained once every rank has said so; engines may have the weights."""
    progress = tables.progress
    if tables.requests.num_for(Phase.TRAINING):
        return None
    if progress.missing:
        return _make_again(tables)
    if not tables.publication.may_offer:  # which goes on beside the step
        return None
    if tables.unusable:
        _forget_unusable(tables)
    progress.is_training, progress.is_trained = False, True
    of_step = tables.groups.of_step(progress.number, "train")
    if of_step is not None:
        tables.recording.begin(progress.number, "train", {str(group.engine) for group in of_step.groups})
    if not tables.spec.has_engines or tables.steps.is_interrupted:
        return []
    return tables.publication.offer(progress.number, has_update=progress.has_update)


def dispatch_batches(tables: Tables, purpose: Purpose) -> list[Action]:
    """Send every rank its share of the step's batch, to train on or to evaluate."""
    phase = Phase.TRAINING if purpose == "train" else Phase.VALIDATING
    return [
        DispatchBatch(member=rank, step=tables.step, purpose=purpose, **tables.open(rank, phase))
        for rank in tables.members.all("trainer")
    ]


def _make_again(tables: Tables) -> list[Action]:
    """Have the samples that trainers could not fetch made again; no rank has stepped."""
    progress = tables.progress
    missing, progress.missing, progress.is_training = progress.missing, {}, False
    why = "; ".join(f"{engine}: {reason}" for engine, reason in missing.items())
    if not tables.spec.has_engines and progress.num_fetches == _MAX_FETCHES:
        tried = f"{why} ({_MAX_FETCHES} times in this step)"
        raise ServiceError("coordinator", f"training step {progress.number}", f"samples are missing: {tried}")
    tables.publication.resume()
    if tables.steps.is_interrupted:
        tables.abandon_step()
        return []
    if not tables.spec.has_engines:  # they are of a record, and are still there
        return [Say(text=f"samples of step {tables.step} are missing and are fetched again: {why}")]
    groups = tables.groups.untake(tables.step, "train")
    return [
        Say(text=f"samples of step {tables.step} are missing and are made again: {why}"),
        *regeneration.put_back(tables, [group for group in groups if group.engine in missing]),
        *losses.take_unusable(tables, missing),
    ]


def _forget_unusable(tables: Tables) -> None:
    """Forget how often the samples of engines could not be used whose samples now were."""
    of_step = tables.groups.of_step(tables.step, "train")
    for group in () if of_step is None else of_step.groups:
        tables.unusable.pop(str(group.engine), None)
