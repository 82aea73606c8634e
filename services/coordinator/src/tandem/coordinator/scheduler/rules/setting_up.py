"""Setting up: build processes, plan transfers, and bring engines the first weights."""

from __future__ import annotations

from tandem.common.messages import BuildTrainer, OpenRendezvous, RendezvousOpened
from tandem.coordinator.scheduler.events import Action, DispatchCommand, FindRestored
from tandem.coordinator.scheduler.phases import RunPhase
from tandem.coordinator.scheduler.rules import leaving
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables


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
                images_at=tables.spec.images_at,
                **tables.open(rank, RunPhase.BUILDING),
            ),
        )
        for rank in ranks
    ]
