"""A cluster of obedient processes that a scheduler is driven with: events in, actions out, no sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from samples_harness import scored

from tandem.common.messages import (
    AwaitCheckpoint,
    BuildEngine,
    BuildTrainer,
    CheckpointCopied,
    CheckpointSaved,
    CommitVersion,
    ConnectTransferGroup,
    CopyWeights,
    DigestsReported,
    EngineBuilt,
    Evaluated,
    Generated,
    GroupsStreamed,
    InstallProgram,
    MemoryUse,
    OpenRendezvous,
    PlanTransfers,
    ProgramInstalled,
    Purpose,
    Refit,
    Refitted,
    RendezvousOpened,
    Reply,
    ReportDigests,
    RestoreSamples,
    SampleScored,
    SamplesFinished,
    SamplesRecorded,
    SaveCheckpoint,
    Trained,
    TrainerBuilt,
    TransferGroupConnected,
    TransfersPlanned,
    VersionCommitted,
    WeightsCopied,
)
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.agenda import RuleAgenda
from tandem.coordinator.scheduler.events import (
    Action,
    CommitStep,
    DispatchBatch,
    DispatchCommand,
    DispatchGroups,
    DispatchPrompts,
    DispatchRecord,
    DrawPrompts,
    FindRestored,
    FinishRun,
    GroupSize,
    Place,
    ProcessJoined,
    ProcessLost,
    ProcessReplied,
    PromptsDrawn,
    RestoredFound,
    RestoredGroup,
    StopRequested,
)
from tandem.coordinator.scheduler.invariants import validate
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import CommandDeadlines, RunSpec
from tandem.coordinator.scheduler.tables import SchedulerTables
from tests.harness.agendas import Checked
from tests.harness.members import at

GRPO = RunSpec(
    has_engines=True,
    expected={"trainer": 2, "rollout": 2, "refit": 1},
    first_step=1,
    last_step=3,
    num_groups=5,
    num_validation_groups=3,
    validate_every=2,
    validate_at_start=True,
    save_every=2,
    resume_from="",
    checkpoint_folder="ck/{step}",
    allow_alias=True,
    is_verified=True,
    max_replacements=1,
    replacement_window_s=3600.0,
    deadlines=CommandDeadlines(join=10, build=20, generate=30, train=40, evaluate=50, refit=5, save=60, leave=70),
)
MEMORY = MemoryUse(peak=2, held=1)
SFT = msgspec.structs.replace(GRPO, has_engines=False, expected={"trainer": 1}, validate_at_start=False)


class SentBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer is sent by a `DispatchBatch`."""

    process: str
    command_id: int
    deadline_s: float
    step: int
    purpose: Purpose


class SentGroups(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer is sent by a `DispatchGroups`."""

    process: str
    command_id: int
    deadline_s: float
    step: int


Sent = DispatchCommand | DispatchPrompts | SentBatch | SentGroups | DispatchRecord
"""What a process answers."""


def sent_batches(action: DispatchBatch | DispatchGroups) -> list[SentBatch] | list[SentGroups]:
    """Return what each trainer is sent, in turn."""
    if isinstance(action, DispatchGroups):
        return [SentGroups(process=name, step=action.step, **fields) for name, fields in action.commands.items()]
    return [
        SentBatch(process=process, step=action.step, purpose=action.purpose, **fields)
        for process, fields in action.commands.items()
    ]


def answer(action: Sent) -> Reply:
    """Return the reply of a process that does what it is told."""
    if not isinstance(action, DispatchCommand):
        return answer_work(action)
    command_id = action.command.command_id
    match action.command:
        case OpenRendezvous():
            return RendezvousOpened(command_id=command_id, host="127.0.0.1", port=1234)
        case BuildTrainer():
            layout = f"{action.process} holds".encode()
            return TrainerBuilt(command_id=command_id, version=0, num_parameters=1, shares_prompts=True, layout=layout)
        case BuildEngine():
            wants = f"{action.process} wants".encode()
            return EngineBuilt(command_id=command_id, layouts=(wants,), samples_at=at(f"tcp://{action.process}:1"))
        case PlanTransfers(sources=sources, destinations=destinations):
            return TransfersPlanned(
                command_id=command_id,
                programs={process: f"program of {process}".encode() for process in [*sources, *destinations]},
                senders=(),
                transfer_groups=(),
                num_bytes={},
                predicted_s=0.5,
                bound_s=0.25,
                seconds=0.0,
            )
        case InstallProgram():
            return ProgramInstalled(command_id=command_id, num_copies=1, num_bytes=1)
        case ConnectTransferGroup(transfer_group=transfer_group):
            return TransferGroupConnected(command_id=command_id, transfer_group=transfer_group)
        case Refit(version=version):
            return Refitted(command_id=command_id, version=version, num_bytes={}, seconds=0.0, memory=MEMORY)
        case ReportDigests(version=version):
            digests = (f"{action.process} at {version}".encode(),)
            return DigestsReported(command_id=command_id, version=version, digests=digests, seconds=0.0)
        case CommitVersion(version=version):
            return VersionCommitted(command_id=command_id, version=version, differing={}, digest=9)
        case CopyWeights(version=version, with_digests=with_digests):
            digests = (f"{action.process} at {version}".encode(),) if with_digests else ()
            return WeightsCopied(command_id=command_id, version=version, digests=digests)
        case SaveCheckpoint() | AwaitCheckpoint() | RestoreSamples():
            return answer_from_disk(action.command)


def answer_work(action: DispatchPrompts | SentBatch | SentGroups | DispatchRecord) -> Reply:
    """Return the last reply of a process that generates, trains, evaluates or records."""
    if isinstance(action, SentGroups):
        return GroupsStreamed(command_id=action.command_id, step=action.step, num_tokens=1)
    if isinstance(action, DispatchRecord):
        return SamplesRecorded(
            command_id=action.command_id, step=action.step, num_samples=1, num_bytes=100, num_missing=0
        )
    if isinstance(action, DispatchPrompts):
        return Generated(
            command_id=action.command_id,
            step=action.step,
            purpose=action.purpose,
            num_samples=1,
            num_tokens=1,
            seconds={},
            memory=MEMORY,
        )
    if action.purpose == "validate":
        return Evaluated(command_id=action.command_id, step=action.step, metrics={})
    return Trained(
        command_id=action.command_id,
        step=action.step,
        version=action.step,
        metrics={},
        seconds={},
        compute_s=0.0,
        waited_s=0.0,
        has_update=action.process == "trainer-0",
        memory=MEMORY,
    )


def answer_from_disk(command: SaveCheckpoint | AwaitCheckpoint | RestoreSamples) -> Reply:
    """Return the reply of a trainer that saves, or the last one of a rollout that reads."""
    if isinstance(command, RestoreSamples):
        return Generated(
            command_id=command.command_id,
            step=command.step,
            purpose="train",
            num_samples=1,
            num_tokens=0,
            seconds={},
            memory=MEMORY,
        )
    if isinstance(command, SaveCheckpoint):
        return CheckpointCopied(command_id=command.command_id, why_waited="")
    return CheckpointSaved(command_id=command.command_id, num_bytes=1)


def result(group: int, sample: int, reward: float = 0.0, **components: float) -> SampleScored:
    """Return what an engine says of a sample."""
    return scored(group, sample, response_length=1 + sample, reward=reward, components=components)


def made_with(sample: SampleScored, oldest: int, newest: int) -> SampleScored:
    """Return a sample that was begun with one version and ended with another."""
    counts = (*[0] * (newest - oldest), sample.response_length)
    return msgspec.structs.replace(sample, oldest_version=oldest, newest_version=newest, tokens_by_version=counts)


class Cluster:
    """Drives a scheduler with obedient processes; one second passes between a command and its answer."""

    num_samples = 1
    """Of each group."""

    def __init__(
        self,
        spec: RunSpec,
        kept: Mapping[Place, RestoredGroup] = {},
        agenda: type[RuleAgenda[SchedulerTables]] = Checked,
    ) -> None:
        self.plan = Scheduler(spec, now=0.0, agenda=agenda)
        self.agenda = agenda
        self.log: list[tuple[Any, list[Action]]] = []
        """Every event, and the actions it has led to."""
        self.kept = kept
        self.now = 0.0
        self.pending: list[Sent] = []
        self.done: list[Action] = []
        self.commands: list[Sent] = []
        self.adjust: Callable[[Reply], Reply] = lambda reply: reply
        self.begun_with: dict[int, int] = {}
        """The weights that the engine held which was given a command to generate."""

    @property
    def tables(self) -> SchedulerTables:
        """What the scheduler knows."""
        return self.plan.tables

    def give_unchecked(self, event: Any) -> list[Action]:
        """Give an event to tables that contradict each other, and to nobody what follows."""
        return self.plan.handle(event)

    def give(self, event: Any) -> list[Action]:
        actions: list[Action] = []
        handled = self.plan.handle(event)
        self.log.append((event, handled))
        for action in handled:
            if isinstance(action, DrawPrompts):
                sizes = tuple(self.size_of(action, group) for group in action.groups)
                drawn = PromptsDrawn(now=self.now, step=action.step, purpose=action.purpose, sizes=sizes)
                actions += self.give(drawn)
                continue
            if isinstance(action, FindRestored):
                actions += self.give(RestoredFound(now=self.now, groups=self.kept))
                continue
            actions.append(action)
            if isinstance(action, DispatchPrompts):
                engine = self.tables.engines.get(action.process)  # none if it is let go right after this
                self.begun_with[action.command_id] = -1 if engine is None else engine.version
            if isinstance(action, DispatchCommand | DispatchPrompts | DispatchBatch | DispatchGroups | DispatchRecord):
                sent = sent_batches(action) if isinstance(action, DispatchBatch | DispatchGroups) else [action]
                self.pending += sent
                self.commands += sent
            else:
                self.done.append(action)
            self.take_note(action)
        validate(self.tables)
        return actions

    def take_note(self, action: Action) -> None:
        """Hear of each action, once and in turn."""

    def size_of(self, drawn: DrawPrompts, group: int) -> GroupSize:
        return GroupSize(num_samples=self.num_samples, num_tokens=1)

    def join_all(self) -> None:
        for kind, count in self.tables.spec.expected.items():
            for index in reversed(range(count)):
                self.give(ProcessJoined(now=self.now, process=f"{kind}-{index}", kind=kind))

    def answer_next(self) -> None:
        action = self.pending.pop(0)
        self.now += 1.0
        if isinstance(action, DispatchPrompts):
            self.send_samples(action)
        if isinstance(action, DispatchCommand) and isinstance(action.command, RestoreSamples):
            self.send_kept(action.process, action.command)
        self.give(ProcessReplied(now=self.now, process=action.process, reply=self.adjust(answer(action))))

    def send_samples(self, command: DispatchPrompts) -> None:
        """Have an engine finish every sample of a command."""
        oldest = self.begun_with[command.command_id]
        engine = self.tables.engines.get(command.process)
        newest = engine.version if engine is not None and engine.version >= 0 else oldest
        samples = tuple(
            made_with(self.result(group, i), oldest, newest)
            for group in command.groups
            for i in range(self.num_samples)
        )
        reply = SamplesFinished(
            command_id=command.command_id, step=command.step, purpose=command.purpose, samples=samples
        )
        self.give(ProcessReplied(now=self.now, process=command.process, reply=reply))

    def send_kept(self, process: str, command: RestoreSamples) -> None:
        """Have a rollout find every sample of a command on disk."""
        newest = {number: self.kept[command.step, number].newest_version for number in numbers_of(command)}
        samples = tuple(
            made_with(self.result(group, i), version, version)
            for group, version in newest.items()
            for i in range(self.num_samples)
        )
        reply = SamplesFinished(command_id=command.command_id, step=command.step, purpose="train", samples=samples)
        self.give(ProcessReplied(now=self.now, process=process, reply=reply))

    def result(self, group: int, sample: int) -> SampleScored:
        return result(group, sample)

    def hold(self, kind: type[Any]) -> list[DispatchCommand]:
        """Take the commands of a kind out of those that are answered next."""
        held = [a for a in self.pending if isinstance(a, DispatchCommand) and isinstance(a.command, kind)]
        self.pending = [a for a in self.pending if a not in held]
        return held

    def run_until(self, phase: RunPhase) -> None:
        for _ in range(500):
            if self.tables.phase is phase:
                return
            self.answer_next()
        raise AssertionError(f"never reached {phase}")

    def commits(self) -> list[int]:
        return [action.step for action in self.done if isinstance(action, CommitStep)]


def numbers_of(command: RestoreSamples) -> list[int]:
    """Return the groups that a command is for."""
    return sorted(number for keys in command.files.values() for _, number in keys)


def kinds(cluster: Cluster) -> list[str]:
    """Name every command in turn, with the number of processes that got it."""
    names: list[str] = []
    for action in cluster.commands:
        if isinstance(action, DispatchCommand):
            names.append(type(action.command).__name__)
        elif isinstance(action, DispatchRecord):
            names.append(f"{type(action).__name__}:{action.step}")
        else:
            names.append(f"{type(action).__name__}:{action.purpose}:{action.step}")
    compressed: list[str] = []
    for name in names:
        if compressed and compressed[-1].split(" ×")[0] == name:
            count = int(compressed[-1].split(" ×")[1])
            compressed[-1] = f"{name} ×{count + 1}"
        else:
            compressed.append(f"{name} ×1")
    return compressed


def commands_of(cluster: Cluster, kind: type[Any]) -> list[Any]:
    return [a.command for a in cluster.commands if isinstance(a, DispatchCommand) and isinstance(a.command, kind)]


def only_finish(actions: list[Action]) -> FinishRun:
    (finish,) = actions
    assert isinstance(finish, FinishRun)
    return finish


def interrupt(cluster: Cluster) -> list[Action]:
    return cluster.give(StopRequested(now=cluster.now))


def lose(cluster: Cluster, engine: str) -> list[Action]:
    cluster.pending = [a for a in cluster.pending if a.process != engine]
    return cluster.give(ProcessLost(now=cluster.now, process=engine, reason="killed by SIGKILL"))


def replace(cluster: Cluster, engine: str) -> None:
    cluster.give(ProcessJoined(now=cluster.now, process=engine, kind="rollout"))
