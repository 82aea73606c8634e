"""The start and the end of a run: build processes, plan transfers; finish, be interrupted, or fail."""

from __future__ import annotations

from tandem.common.errors import ServiceError
from tandem.common.messages import BuildTrainer, OpenRendezvous, RendezvousOpened
from tandem.coordinator.scheduler.events import Action, DispatchCommand, FindRestored, FinishRun, TellUser
from tandem.coordinator.scheduler.requests import GENERATION, RunPhase
from tandem.coordinator.scheduler.rules import leaving
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


def set_up(tables: SchedulerTables) -> list[Action] | None:
    """Go on once every process has done what the stage asks for."""
    assert tables.stage is not None, "a rule of the time before everything is set up"
    if tables.requests.num_for(tables.stage) or not tables.processes.is_complete:
        return None
    trainers, engines = tables.senders, tables.engines_to_begin
    transfers = tables.transfers
    match tables.stage:
        case RunPhase.JOINING:
            tables.stage = RunPhase.BUILDING
            engines = tables.engines_to_begin = [*tables.processes.of_kind["rollout"]]
            builds: list[Action] = [transfers.request_build(engine) for engine in engines]
            return builds if tables.spec.engines_first else [_have_trainers_meet(tables), *builds]
        case RunPhase.BUILDING if tables.spec.engines_first and not tables.trainers_meet:
            return [_have_trainers_meet(tables)]
        case RunPhase.BUILDING if tables.spec.has_engines:
            tables.stage = RunPhase.PLANNING
            return [FindRestored(), transfers.request_plan(trainers, engines)]
        case RunPhase.PLANNING:
            tables.stage = RunPhase.INSTALLING
            return [*transfers.request_install()]
        case RunPhase.INSTALLING:
            tables.stage = RunPhase.CONNECTING
            return [
                command
                for transfer_group in transfers.plan.transfer_groups
                for command in transfers.request_connect(transfer_group)
            ]
        case _:
            tables.stage = None
            actions = tables.weights.begin(trainers, engines)
            for engine in tables.told_to_leave:
                actions += leaving.take_leaving(tables, engine)
            return [*actions, *tables.weights.offer(tables.step, has_update=False)]


def _have_trainers_meet(tables: SchedulerTables) -> Action:
    """Begin to build trainers, which are told where they meet once that is known."""
    tables.trainers_meet = True
    return DispatchCommand(process="trainer-0", command=OpenRendezvous(**tables.open("trainer-0", RunPhase.BUILDING)))


def start(tables: SchedulerTables) -> list[Action] | None:
    """Begin the first step, now that all hold the weights to start from. Validate these if asked to."""
    if tables.is_refitting or tables.weights.is_transferring:
        return None
    tables.steps.has_started = True
    tables.watch.begin_step(tables.requests.now)  # the time before is not part of a step
    is_validated = tables.spec.validate_at_start and tables.step == 0 and not tables.steps.is_interrupted
    tables.progress.state = StepState.TRAINED if is_validated else StepState.COMMITTED
    return []


def build_trainers(tables: SchedulerTables, opened: RendezvousOpened) -> list[Action]:
    """Build every rank, now that their meeting place is known."""
    ranks = tables.processes.of_kind["trainer"]
    return [
        DispatchCommand(
            process=rank,
            command=BuildTrainer(
                rendezvous_host=opened.host,
                rendezvous_port=opened.port,
                world_size=len(ranks),
                version=tables.step,
                checkpoint=tables.spec.resume_from,
                samples_folder=tables.spec.samples_folder,
                **tables.open(rank, RunPhase.BUILDING),
            ),
        )
        for rank in ranks
    ]
