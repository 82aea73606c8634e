"""How long does the scheduler take for an event, against the size of the run and the number of groups that are done?

A simulated run of 1,000 engines and 100,000 rollout groups through the pure scheduler, beside one of 10 engines and
1,000 groups: every sample and every answer is an event of its own. Each is run twice, with the agenda of rules and with
one that asks every rule after each event, as a measure that does not depend on the machine. Only `Scheduler.handle` is
timed, in seconds of the processor, of which others that share the machine take none; they do slow it down.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque

import pytest
from measure import keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture

from tandem.common.messages import (
    BuildEngine,
    BuildTrainer,
    CommitVersion,
    DigestsReported,
    EngineBuilt,
    Generated,
    InstallProgram,
    MemoryUse,
    OpenRendezvous,
    PlanTransfers,
    ProgramInstalled,
    Refit,
    Refitted,
    RendezvousOpened,
    Reply,
    ReportDigests,
    SampleScored,
    SamplesFinished,
    TrainerBuilt,
    TransfersPlanned,
    VersionCommitted,
)
from tandem.coordinator.scheduler import RunSpec, Scheduler
from tandem.coordinator.scheduler.agenda import RuleAgenda
from tandem.coordinator.scheduler.events import (
    Action,
    CommitStep,
    DispatchBatch,
    DispatchCommand,
    DispatchPrompts,
    DrawPrompts,
    Event,
    FindRestored,
    FinishRun,
    GroupSize,
    ProcessJoined,
    ProcessReplied,
    PromptsDrawn,
    RestoredFound,
)
from tandem.coordinator.scheduler.spec import CommandDeadlines, EngineBalance
from tandem.coordinator.scheduler.tables import SchedulerTables
from tests.harness.agendas import AskEverything
from tests.harness.answers import trained
from tests.harness.members import at

NUM_STEPS = 10
NUM_SAMPLES = 4
"""Of a group; each comes by itself."""
MEMORY = MemoryUse(peak=0, held=0)


def sample(group: int, number: int, version: int) -> SampleScored:
    return SampleScored(
        group=group,
        sample=number,
        prompt_length=100,
        response_length=900,
        num_tokens=1000,
        oldest_version=version,
        newest_version=version,
        tokens_by_version=(900,),
        num_turns=1,
        finish_reason="stop",
        reward=float(number % 2),
        correct=False,
        response="",
    )


def replies(action: DispatchCommand | DispatchPrompts) -> list[Reply]:
    """Return what an obedient process says to a command."""
    if isinstance(action, DispatchPrompts):
        command_id, step, purpose = action.command_id, action.step, action.purpose
        finished: list[Reply] = [
            SamplesFinished(
                command_id=command_id, step=step, purpose=purpose, samples=(sample(group, number, step - 1),)
            )
            for group in action.groups
            for number in range(NUM_SAMPLES)
        ]
        generated = Generated(
            command_id=command_id, step=step, purpose=purpose, num_samples=1, num_tokens=1, seconds={}, memory=MEMORY
        )
        return [*finished, generated]
    command_id = action.command.command_id
    match action.command:
        case OpenRendezvous():
            return [RendezvousOpened(command_id=command_id, host="localhost", port=1)]
        case BuildTrainer():
            return [TrainerBuilt(command_id=command_id, version=0, num_parameters=1, shares_prompts=True, layout=b"")]
        case BuildEngine():
            return [EngineBuilt(command_id=command_id, layouts=(b"",), samples_at=at("tcp://localhost:1"))]
        case PlanTransfers(sources=sources, destinations=destinations):
            planned = TransfersPlanned(
                command_id=command_id,
                programs=dict.fromkeys([*sources, *destinations], b""),
                senders=(),
                transfer_groups=(),
                num_bytes={},
                predicted_s=0.0,
                bound_s=0.0,
                seconds=0.0,
            )
            return [planned]
        case InstallProgram():
            return [ProgramInstalled(command_id=command_id, num_copies=1, num_bytes=1)]
        case Refit(version=version):
            return [Refitted(command_id=command_id, version=version, num_bytes={}, seconds=0.0, memory=MEMORY)]
        case ReportDigests(version=version):
            return [DigestsReported(command_id=command_id, version=version, digests=(b"",), seconds=0.0)]
        case CommitVersion(version=version):
            return [VersionCommitted(command_id=command_id, version=version, differing={}, digest=1)]
        case other:
            raise AssertionError(f"{type(other).__name__} is not sent in this run")


class Simulation:
    """A whole run whose processes answer at once."""

    def __init__(self, num_engines: int, num_groups: int, agenda: type[RuleAgenda[SchedulerTables]]) -> None:
        self.spec = RunSpec(
            has_engines=True,
            expected={"trainer": 1, "rollout": num_engines, "refit": 1},
            first_step=1,
            last_step=NUM_STEPS,
            num_groups=num_groups // NUM_STEPS,
            num_validation_groups=0,
            validate_every=0,
            validate_at_start=False,
            save_every=0,
            resume_from="",
            checkpoint_folder="",
            allow_alias=False,
            is_verified=True,
            max_replacements=0,
            replacement_window_s=3600.0,
            balance=EngineBalance(width=8, timeout_s=None),
            deadlines=CommandDeadlines(
                join=1e9, build=1e9, generate=1e9, train=1e9, evaluate=1e9, refit=1e9, save=1e9, leave=1e9
            ),
        )
        self.scheduler = Scheduler(self.spec, 0.0, agenda=agenda)
        self.seconds_of_step: list[float] = []
        self.num_events_of_step: list[int] = []
        self._seconds, self._num_events = 0.0, 0
        self._events: deque[Event] = deque()

    def run(self) -> None:
        """Run from the first process that joins to the end."""
        for kind, count in self.spec.expected.items():
            self._events += [ProcessJoined(now=0.0, process=f"{kind}-{index}", kind=kind) for index in range(count)]
        is_over = False
        while self._events:
            event = self._events.popleft()
            started = time.thread_time()
            actions = self.scheduler.handle(event)
            self._seconds += time.thread_time() - started
            self._num_events += 1
            for action in actions:
                self._answer(action)
                is_over |= isinstance(action, FinishRun) and action.outcome == "finished"
        assert is_over, "the run came to its end"

    @property
    def us_of_step(self) -> list[float]:
        """Microseconds an event of each step, from the second on: the first sets everything up as well."""
        return [1e6 * s / n for s, n in zip(self.seconds_of_step[1:], self.num_events_of_step[1:], strict=True)]

    def _answer(self, action: Action) -> None:
        match action:
            case FindRestored():
                self._events.append(RestoredFound(now=0.0, groups={}))
            case DrawPrompts(step=step, purpose=purpose, groups=groups):
                sizes = (GroupSize(num_samples=NUM_SAMPLES, num_tokens=1000),) * len(groups)
                self._events.append(PromptsDrawn(now=0.0, step=step, purpose=purpose, sizes=sizes))
            case DispatchCommand() | DispatchPrompts():
                self._events += [
                    ProcessReplied(now=0.0, process=action.process, reply=reply) for reply in replies(action)
                ]
            case DispatchBatch(step=step, commands=commands):
                for process, fields in commands.items():
                    reply = trained(fields["command_id"], step)
                    self._events.append(ProcessReplied(now=0.0, process=process, reply=reply))
            case CommitStep():
                self.seconds_of_step.append(self._seconds)
                self.num_events_of_step.append(self._num_events)
                self._seconds, self._num_events = 0.0, 0
            case _:
                pass


@pytest.mark.benchmark(group="scheduler")
@pytest.mark.parametrize(
    ("num_engines", "num_groups"), [(10, 1_000), pytest.param(1_000, 100_000, marks=pytest.mark.long(minutes=3))]
)
def test_microseconds_an_event(benchmark: BenchmarkFixture, num_engines: int, num_groups: int) -> None:
    simulations: dict[type[RuleAgenda[SchedulerTables]], list[Simulation]] = {RuleAgenda: [], AskEverything: []}

    def simulate() -> None:
        for agenda, its in simulations.items():
            gc.collect()
            its.append(Simulation(num_engines, num_groups, agenda))
            its[-1].run()

    benchmark.pedantic(simulate, rounds=3 if num_groups < 10_000 else 1, iterations=1)
    of_step, asking_everything = [
        [statistics.median(us) for us in zip(*(simulation.us_of_step for simulation in its), strict=True)]
        for its in simulations.values()
    ]
    num_events = sum(simulations[RuleAgenda][-1].num_events_of_step)
    ratio = statistics.median(asking_everything) / statistics.median(of_step)
    benchmark.extra_info.update(
        {
            "engines": num_engines,
            "groups": num_groups,
            "events": num_events,
            "microseconds an event, by step from the second": [round(us, 2) for us in of_step],
            "the same, asking every rule": [round(us, 2) for us in asking_everything],
            "asking every rule takes times as long": round(ratio, 2),
            "last step, of the second": round(of_step[-1] / of_step[0], 3),
        }
    )
    keep_ratios(benchmark, "times as long as the agenda", {"asking every rule": ratio})
    print(
        f"\n{num_engines} engines, {num_groups} groups, {num_events} events: {statistics.median(of_step):.1f} us an "
        f"event, {statistics.median(asking_everything):.1f} asking every rule ({ratio:.2f} times as long); the last "
        f"step {of_step[-1] / of_step[0]:.2f} times the second"
    )
