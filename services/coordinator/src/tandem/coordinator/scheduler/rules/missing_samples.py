"""Samples that trainers could not fetch: they are fetched or generated again."""

from __future__ import annotations

from tandem.common.errors import ServiceError
from tandem.coordinator.scheduler.events import Action, TellUser
from tandem.coordinator.scheduler.rules import losing, regeneration
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables

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
        *losing.take_unusable(tables, missing),
    ]


def forget_unusable(tables: SchedulerTables) -> None:
    """Reset the counts of unusable samples for engines with samples that could now be used."""
    of_step = tables.groups.of_step(tables.step, "train")
    for group in () if of_step is None else of_step.groups:
        tables.unusable.pop(str(group.engine), None)
