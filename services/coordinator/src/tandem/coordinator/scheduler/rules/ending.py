"""The end of a run: it is finished, was interrupted, or has failed."""

from __future__ import annotations

from tandem.common.errors import ServiceError
from tandem.coordinator.scheduler.events import Action, FinishRun, TellUser
from tandem.coordinator.scheduler.phases import GENERATION, RunPhase
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables
from tandem.observe.run_folder.journal import Outcome


def finish(tables: SchedulerTables) -> list[Action] | None:
    """End the run once nothing is pending, such as a last version to verify or a checkpoint to write."""
    if tables.error is not None:
        return None if tables.saving.is_out else _end(tables, "failed", tables.error)
    if tables.recording.is_pending(tables.step) or len(tables.requests) or not tables.weights.is_settled:
        return None
    return _end(tables, "interrupted" if tables.steps.is_interrupted else "finished")


def interrupt(tables: SchedulerTables) -> list[Action]:
    """Finish a step that trains, or abandon one that generates, then save and end. On a second call, end now."""
    if tables.error is not None:
        return _end(tables, "failed", tables.error)
    if tables.steps.is_interrupted or tables.stage is not None:
        return _end(tables, "interrupted")
    tables.steps.is_interrupted = True
    if tables.phase in GENERATION:
        tables.requests.drop_all_but(RunPhase.WRITING, RunPhase.RECORDING)
    tables.requests.drop_all(*GENERATION)  # while training goes on, too
    tables.stop_generating()
    if tables.progress.state is StepState.VALIDATING:
        tables.progress.state = StepState.VALIDATED
    if tables.steps.has_started and tables.progress.state is StepState.GENERATING:
        tables.abandon_step()
    return []


def fail(tables: SchedulerTables, error: ServiceError) -> list[Action]:
    """End the run; if a checkpoint that can still become whole is being written, after that, else at once."""
    if tables.error is None and tables.saving.is_out:
        tables.error = error
        tables.requests.drop_all_but(RunPhase.WRITING)
        tables.stop_generating()
        is_replaced = not error.is_final and tables.replacements.are_left(tables.requests.now)
        outcome = "it is replaced as soon as the" if is_replaced else "the run ends as soon as its"
        return [TellUser(text=f"{error}; {outcome} last checkpoint is written")]
    return _end(tables, "failed", tables.error or error)


def _end(tables: SchedulerTables, outcome: Outcome, error: ServiceError | None = None) -> list[Action]:
    tables.requests.drop_all_but()
    tables.finish = FinishRun(outcome=outcome, error=error)
    return [tables.finish]
