"""Whole runs against whom everything conspires: any order of answers, losses, partial and wrong weights, interrupts.

What processes do is modelled as far as the scheduler depends on it: they carry out commands one after the other,
engines hold weights that may be wrong, requests go on with new ones or are given up, a digest is abandoned for the next
one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import pytest
from cluster_harness import GRPO, Cluster, SentBatch, SentGroups, answer, sent_batches

from tandem.common.errors import ServiceLost
from tandem.common.messages import (
    CommitVersion,
    ConnectTransferGroup,
    DigestsReported,
    Failed,
    Generated,
    PlannedTransferGroup,
    Refit,
    Reply,
    ReportDigests,
    SampleScored,
    SamplesFinished,
    SamplesMissing,
    Trained,
    TransfersPlanned,
    VersionCommitted,
)
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.agenda import RuleAgenda
from tandem.coordinator.scheduler.engines.processes import CountedReplacements
from tandem.coordinator.scheduler.engines.transfers import processes_in
from tandem.coordinator.scheduler.events import (
    Action,
    AwaitedByHand,
    CommandErred,
    CommitStep,
    DispatchBatch,
    DispatchCommand,
    DispatchGroups,
    DispatchPrompts,
    DrawPrompts,
    EngineDraining,
    FinishRun,
    GroupSize,
    LetGo,
    ProcessJoined,
    ProcessLost,
    ProcessReplied,
    PublishCheckpoint,
    RecordRefit,
    ReplaceEngine,
    StopRequested,
    TimePassed,
)
from tandem.coordinator.scheduler.groups.table import GroupState
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import (
    CommandDeadlines,
    DynamicSampling,
    EngineBalance,
    RunSpec,
    StreamingTraining,
)
from tandem.coordinator.scheduler.steps import StepState
from tandem.coordinator.scheduler.tables import SchedulerTables
from tests.harness.agendas import AskEverything, Checked

LAST_STEP = 6
NUM_ENGINES = 3
NAMES = [f"rollout-{index}" for index in range(6)]
"""Of all engines that there ever are."""
LEAVE_S = 50.0
JOIN_S = 1e6
"""Longer than a run takes, unless nobody comes in the place of who is lost."""
MESHES = (PlannedTransferGroup(name="the mesh", members=("trainer-0", "rollout-0", "rollout-1")),)
"""The third engine copies."""
FOREVER = CommandDeadlines(
    join=JOIN_S, build=1e9, generate=1e9, train=1e9, evaluate=1e9, refit=1e9, save=1e9, leave=LEAVE_S
)
BACKGROUND = (ReportDigests, ConnectTransferGroup)

AnyCommand: TypeAlias = DispatchCommand | DispatchPrompts | SentBatch | SentGroups


class Troubles(msgspec.Struct, frozen=True, kw_only=True):
    """How likely each trouble is, where it can happen."""

    loss: float = 0.0
    trainer_loss: float = 0.0
    service_loss: float = 0.0
    partial: float = 0.0
    wrong: float = 0.0
    missing: float = 0.0
    tick: float = 0.0
    interrupt: float = 0.0
    join: float = 0.0
    leave: float = 0.0
    hangs: float = 0.0
    """Of those that were told to leave, how many must be made to."""
    nobody_comes: float = 0.0
    """In the place of an engine that was lost."""


class Weights:
    """What an engine holds after one refit."""

    def __init__(self, version: int, *, is_wrong: bool) -> None:
        self.version = version
        self.is_wrong = is_wrong
        self.is_proven = False


class Job:
    """A `Generate` that an engine is at."""

    def __init__(self, command: DispatchPrompts, samples: Sequence[tuple[int, int]], begun_with: int) -> None:
        self.command = command
        self.samples = list(samples)
        self.begun_with = begun_with
        """The place of the weights in the engine's history."""


def is_informative(results: Sequence[SampleScored]) -> bool:
    return results[0].group % 2 == 0


class Harried(Cluster):
    """A cluster of processes that have troubles."""

    num_samples = 2

    def __init__(
        self, seed: int, spec: RunSpec, troubles: Troubles, agenda: type[RuleAgenda[SchedulerTables]] = Checked
    ) -> None:
        self.random = random.Random(seed)
        self.troubles = troubles
        self.history: dict[str, list[Weights]] = {}
        """Of each engine process, oldest first."""
        self.is_partial: set[str] = set()
        self.absent: list[str] = []
        self.jobs: dict[int, Job] = {}
        self.made_with: dict[float, list[Weights]] = {}
        """The weights that each sample was made with."""
        self.digests: dict[bytes, Weights] = {}
        self.failed_at: set[tuple[str, int]] = set()
        """Engines that had trouble with a version: once only, since the second time is the end of the run."""
        self.epochs: dict[tuple[str, int], set[str]] = {}
        """Who has begun to join a mesh."""
        self.lacking: dict[int, dict[str, str]] = {}
        """Of each step whose samples are missing, the engines that they are missing at."""
        self.num_missing: dict[int, int] = {}
        self.verified: set[int] = set()
        """Versions that were proven to be on an engine; of others, which no engine kept so long, no record is due."""
        self.streamed: set[tuple[int, int, int, int]] = set()
        """Groups that trainers were given before their step was whole: term, step, number and request."""
        self.is_interrupted = False
        self.num_joined = self.num_let_go = 0
        self.present: set[str] = set()
        self.num_terms = 1
        self.begun_at = 0
        """How many actions there were before this term."""
        self.before: list[int] = []
        """Steps that were done before it, and count."""
        super().__init__(spec, agenda=agenda)
        self.tables.is_informative = is_informative

    def give(self, event: object) -> list[Action]:
        actions = super().give(event)
        tables = self.tables
        assert tables.watch.phase is tables.phase, "the phase is noted when it changes"
        return actions

    # --- commands ----------------------------------------------------------------------------------------------------

    def tell(self, event: object) -> None:
        """Give an event from outside to the scheduler; nobody waits for what no process owes then."""
        self.give(event)
        engines = self.tables.engines
        self.verified |= {engines[name].version for name in engines if engines[name].is_verified}
        owed = {self.id_of(action) for action in self.pending}
        assert owed >= set(self.tables.requests), "nobody owes what is waited for"

    def take_note(self, action: Action) -> None:
        match action:
            case DispatchPrompts():
                self.begin_job(action)
            case DispatchBatch(purpose="train"):
                for sent in sent_batches(action):
                    self.forget_pending(sent, ReportDigests)
                self.check_batch(action.step)
            case DispatchGroups():
                self.check_groups(action)
            case DispatchCommand(command=ReportDigests()):
                self.forget_pending(action, ReportDigests)
            case DispatchCommand(command=Refit(only=only)) if not only or action.process in only:
                self.forget_pending(action, ReportDigests)
                self.check_mesh(action.process, action.command)
            case DispatchCommand(command=ConnectTransferGroup(transfer_group=transfer_group, epoch=epoch)):
                self.forget_pending(action, ConnectTransferGroup)
                self.epochs.setdefault((transfer_group, epoch), set()).add(action.process)
            case LetGo(process=process, is_awaited=is_awaited):
                self.end(process)
                self.absent = [name for name in self.absent if name != process]
                self.num_let_go += 1
                if is_awaited:
                    self.absent.append(process)
            case ReplaceEngine(process=process) if process not in self.absent and process in self.tables.engines:
                self.end(process)  # its samples could not be used
                self.absent.append(process)
            case CommitStep(step=step, validated=validated):
                for sample in validated:
                    assert all(w.version == step and w.is_proven for w in self.made_with[sample.components["made"]])
            case _:
                pass

    def check_mesh(self, receiver: str, command: Refit) -> None:
        """Assert that those who pass weights on to a receiver have the same, or receive them with it."""
        for transfer_group in self.tables.transfers.plan.transfer_groups:
            processes = processes_in(transfer_group)
            for other in processes if receiver in processes and command.only else ():
                if other.startswith("rollout") and other not in command.only:
                    assert other not in self.is_partial
                    assert self.history[other], f"{other} is gone"
                    assert self.history[other][-1].version == command.version, f"{other} passes on what is old"

    def begin_job(self, command: DispatchPrompts) -> None:
        for command_id in [i for i, job in self.jobs.items() if job.command.process == command.process]:
            if command_id < command.cancel_before:
                self.give_up(command_id)
        history, purpose = self.history[command.process], command.purpose
        if command.groups:
            assert command.process not in self.is_partial
            age = command.step - 1 - history[-1].version
            if purpose == "validate":
                assert age == -1, "validated are the step's own weights"
            else:
                assert 0 <= age <= self.tables.spec.max_trajectory_age_steps
        samples = [(group, sample) for group in command.groups for sample in range(self.num_samples)]
        self.jobs[command.command_id] = Job(command, samples, len(history) - 1)

    def give_up(self, command_id: int) -> None:
        self.jobs.pop(command_id, None)
        self.pending = [action for action in self.pending if self.id_of(action) != command_id]

    def forget_pending(self, action: DispatchCommand | SentBatch, kind: type[object]) -> None:
        """A command takes the place of earlier ones of a kind, which are never answered."""
        self.pending = [
            each
            for each in self.pending
            if each is action
            or not (
                isinstance(each, DispatchCommand) and each.process == action.process and isinstance(each.command, kind)
            )
        ]

    def check_batch(self, step: int) -> None:
        of_step = self.tables.groups.of_step(step, "train")
        assert of_step is not None
        spec = self.tables.spec
        for record in of_step.records():
            made_with = self.made_with[record.scored.components["made"]]
            assert all(weights.is_proven and not weights.is_wrong for weights in made_with)
            oldest, newest = made_with[0].version, made_with[-1].version
            assert (oldest, newest) == (record.scored.oldest_version, record.scored.newest_version)
            assert step - 1 - spec.max_trajectory_age_steps <= oldest <= newest < step
        refitting = [a for a in self.pending if isinstance(a, DispatchCommand) and isinstance(a.command, Refit)]
        assert not [a for a in refitting if not a.command.only or a.process in a.command.only], (
            "nobody reads what changes"
        )

    @staticmethod
    def id_of(action: AnyCommand) -> int:
        return action.command.command_id if isinstance(action, DispatchCommand) else action.command_id

    def size_of(self, drawn: DrawPrompts, group: int) -> GroupSize:
        return GroupSize(num_samples=self.num_samples, num_tokens=4)

    # --- what happens next -------------------------------------------------------------------------------------------

    def can_answer(self, action: AnyCommand) -> bool:
        for earlier in self.pending:
            if earlier is action:
                break
            holds_up = isinstance(earlier, SentBatch) or (
                isinstance(earlier, DispatchCommand) and not isinstance(earlier.command, BACKGROUND)
            )
            if holds_up and earlier.process == action.process:
                return False
        if isinstance(action, DispatchCommand) and isinstance(action.command, ConnectTransferGroup):
            transfer_group = next(
                transfer_group for transfer_group in MESHES if transfer_group.name == action.command.transfer_group
            )
            return self.epochs[transfer_group.name, action.command.epoch] == set(processes_in(transfer_group))
        return True

    def go_on(self) -> bool:
        """Have something happen; return whether anything can."""
        chance, troubles = self.random.random, self.troubles
        can = [action for action in self.pending if self.can_answer(action)]
        engines = [name for name in self.tables.engines if name not in self.absent]
        free = [name for name in NAMES if name not in self.present and name not in self.absent]
        self.now += 1.0
        if self.absent and (not can or chance() < 0.1):
            name = self.absent.pop(self.random.randrange(len(self.absent)))
            self.present |= {name} - {"refit-0"}
            self.tell(ProcessJoined(now=self.now, process=name, kind="refit" if name == "refit-0" else "rollout"))
        elif troubles.join and free and self.may_lose("") and chance() < troubles.join:
            self.join(self.random.choice(free))
        elif troubles.leave and engines and self.may_lose("") and chance() < troubles.leave:
            self.tell(EngineDraining(now=self.now, process=self.random.choice(engines)))
        elif troubles.hangs and (not can or chance() < troubles.hangs) and self.tables.engines.draining:
            self.now += LEAVE_S
            self.tell(TimePassed(now=self.now))
        elif troubles.nobody_comes and self.may_do_without() and chance() < troubles.nobody_comes:
            self.absent = []
            self.now += JOIN_S + 1.0
            self.tell(TimePassed(now=self.now))
        elif engines and self.tables.steps.has_started and chance() < troubles.loss:
            self.lose(self.random.choice(engines))
        elif troubles.service_loss and self.may_lose("refit-0") and chance() < troubles.service_loss:
            self.lose("refit-0")
        elif troubles.trainer_loss and self.may_lose("trainer-1") and chance() < troubles.trainer_loss:
            self.pending = [action for action in self.pending if action.process != "trainer-1"]
            self.tell(ProcessLost(now=self.now, process="trainer-1", reason="killed by SIGKILL"))
        elif chance() < troubles.interrupt and not self.is_interrupted:
            self.is_interrupted = True
            self.tell(StopRequested(now=self.now))
        elif chance() < troubles.tick or (not can and self.tables.full):
            self.tell(TimePassed(now=self.now))
        elif can:
            self.answer_one(self.random.choice(can))
        else:
            return False
        return True

    def check_groups(self, action: DispatchGroups) -> None:
        """Assert that trainers are idle, and are given whole groups of proven weights, none of them twice."""
        of_step = self.tables.groups.of_step(action.step, "train")
        assert of_step is not None
        assert self.tables.progress.state is StepState.GENERATING
        assert action.step == self.tables.step
        assert not [each for each in self.pending[: -len(action.commands)] if isinstance(each, SentBatch | SentGroups)]
        for number in action.groups:
            group = of_step.groups[number]
            assert group.state is GroupState.READY
            assert len(group.results) == self.num_samples
            made_with = [self.made_with[result.components["made"]] for result in group.results.values()]
            assert all(weights.is_proven and not weights.is_wrong for each in made_with for weights in each)
            key = self.num_terms, action.step, number, group.request
            assert key not in self.streamed
            self.streamed.add(key)

    def may_lose(self, name: str) -> bool:
        return self.tables.steps.has_started and self.tables.error is None and name not in self.absent

    def may_do_without(self) -> bool:
        """Tell whether engines are lost, and others can go on without them."""
        is_lost = {*self.absent} - {"refit-0"} == {*self.absent} != set()
        stays = {*self.tables.engines.staying()} - {*self.absent}
        return self.may_lose("") and is_lost and bool(stays) and not self.tables.transfers.plan.transfer_groups

    def join(self, name: str) -> None:
        self.num_joined += 1
        self.present.add(name)
        self.tell(ProcessJoined(now=self.now, process=name, kind="rollout"))

    def lose(self, name: str) -> None:
        self.end(name)
        if name not in self.tables.engines.draining:
            self.absent.append(name)
        self.tell(ProcessLost(now=self.now, process=name, reason="killed by SIGKILL"))
        if self.troubles.join and self.random.random() < 0.5:
            self.tell(AwaitedByHand(now=self.now, process=name))

    def end(self, name: str) -> None:
        self.present.discard(name)
        for command_id in [i for i, job in self.jobs.items() if job.command.process == name]:
            self.give_up(command_id)
        self.pending = [action for action in self.pending if action.process != name]
        for processes in self.epochs.values():
            processes.discard(name)
        self.history[name] = []
        self.is_partial.discard(name)

    def begin_attempt(self) -> None:
        """Go on with other trainers from the newest checkpoint, as `tandem.coordinator.loop.run` does."""
        done = self.commits()
        saved = [a.step for a in self.done if isinstance(a, PublishCheckpoint) and done and a.step <= done[-1]]
        departed = self.tables.engines.departed
        first = saved[-1] + 1 if saved else 1
        spec = msgspec.structs.replace(self.tables.spec, first_step=first, departed=tuple(departed))
        following = self.tables.requests.next_command_id
        self.plan = Scheduler(spec, self.now, is_informative, first_command_id=following, agenda=self.agenda)
        self.num_terms, self.begun_at = self.num_terms + 1, len(self.done)
        self.before = [step for step in done if step < first]
        self.pending, self.jobs, self.epochs = [], {}, {}
        self.history, self.is_partial, self.lacking, self.num_missing = {}, set(), {}, {}
        self.commands.clear()
        for name in self.present:
            self.give(ProcessJoined(now=self.now, process=name, kind="rollout"))
        for kind, name in (("trainer", "trainer-0"), ("trainer", "trainer-1"), ("refit", "refit-0")):
            if name not in self.absent:
                self.give(ProcessJoined(now=self.now, process=name, kind=kind))

    def commits(self) -> list[int]:
        """Return the steps that count: those of this term, and those before that it went on from."""
        return [*self.before, *(a.step for a in self.done[self.begun_at :] if isinstance(a, CommitStep))]

    def answer_one(self, action: AnyCommand) -> None:
        if isinstance(action, DispatchPrompts):
            return self.go_on_generating(self.jobs[action.command_id])
        self.pending.remove(action)
        reply = self.reply_to(action)
        if isinstance(reply, Failed):
            self.tell(CommandErred(now=self.now, process=action.process, failed=reply))
        else:
            self.tell(ProcessReplied(now=self.now, process=action.process, reply=reply))

    def reply_to(self, action: DispatchCommand | SentBatch) -> Reply | Failed:
        reply = answer(action)
        match action:
            case SentBatch():
                return self.train(action, reply)
            case DispatchCommand(process=process, command=Refit()) if process.startswith("rollout"):
                return self.refit(process, action.command, reply)
            case DispatchCommand(process=process, command=ReportDigests()) if process.startswith("rollout"):
                digest = f"{process}, {len(self.digests)}".encode()
                self.digests[digest] = self.history[process][-1]
                assert isinstance(reply, DigestsReported)
                return msgspec.structs.replace(reply, digests=(digest,))
            case DispatchCommand(command=CommitVersion(digests=digests)):
                differing = {}
                for part, digest in digests.items():
                    if (weights := self.digests.get(digest)) is not None:
                        assert weights.version == action.command.version
                        weights.is_proven = not weights.is_wrong
                        if weights.is_wrong:
                            differing[part] = "one tensor"
                assert isinstance(reply, VersionCommitted)
                return msgspec.structs.replace(reply, differing=differing)
            case _:
                return self.adjust(reply)

    def refit(self, process: str, command: Refit, reply: Reply) -> Reply | Failed:
        if command.only and process not in command.only:
            return reply
        history = self.history.setdefault(process, [])
        is_newer = process not in self.is_partial and bool(history) and command.version > history[-1].version
        is_partial = self.has_trouble(process, command.version, self.troubles.partial)
        if is_partial or not (is_newer and self.tables.spec.updates_in_flight):
            for command_id in [i for i, job in self.jobs.items() if job.command.process == process]:
                self.give_up(command_id)
        if is_partial:
            self.is_partial.add(process)
            return Failed(command_id=command.command_id, phase="refitting", error="partial", expected=True)
        self.is_partial.discard(process)
        is_wrong = self.has_trouble(process, command.version, self.troubles.wrong)
        history.append(Weights(command.version, is_wrong=is_wrong))
        return reply

    def has_trouble(self, process: str, version: int, chance: float) -> bool:
        if (process, version) in self.failed_at or self.random.random() >= chance:
            return False
        self.failed_at.add((process, version))
        return True

    def train(self, action: SentBatch, reply: Reply) -> Reply:
        others = [a for a in self.pending if isinstance(a, SentBatch)]
        if len(others) == self.tables.spec.expected["trainer"] - 1:  # the first rank of all
            self.lacking.pop(action.step, None)
            count = self.num_missing.get(action.step, 0)
            if count < 2 and self.random.random() < self.troubles.missing:
                self.num_missing[action.step] = count + 1
                names = self.random.sample(range(NUM_ENGINES), self.random.randint(1, NUM_ENGINES))
                self.lacking[action.step] = {f"rollout-{i}": "gone" for i in names}
        if action.step not in self.lacking:
            assert isinstance(reply, Trained)
            return reply
        processes = self.lacking[action.step] if action.process == "trainer-0" else {}
        return SamplesMissing(command_id=action.command_id, step=action.step, rollouts=processes)

    def go_on_generating(self, job: Job) -> None:
        command, history = job.command, self.history[job.command.process]
        if job.samples:
            count = self.random.randint(1, len(job.samples))
            taken = [job.samples.pop(self.random.randrange(len(job.samples))) for _ in range(count)]
            samples = tuple(self.finished(group, i, history, job.begun_with) for group, i in taken)
            news = SamplesFinished(
                command_id=command.command_id, step=command.step, purpose=command.purpose, samples=samples
            )
            self.tell(ProcessReplied(now=self.now, process=command.process, reply=news))
        if not job.samples and command.command_id in self.jobs:
            self.give_up(command.command_id)
            reply = answer(command)
            assert isinstance(reply, Generated)
            self.tell(ProcessReplied(now=self.now, process=command.process, reply=reply))

    def finished(self, group: int, number: int, history: list[Weights], begun_with: int) -> SampleScored:
        made_with = history[self.random.randint(begun_with, len(history) - 1) :]
        made = float(len(self.made_with))
        self.made_with[made] = made_with
        oldest, newest = made_with[0].version, made_with[-1].version
        return msgspec.structs.replace(
            self.result(group, number),
            num_tokens=4,
            oldest_version=oldest,
            newest_version=newest,
            tokens_by_version=(*[1] * (newest - oldest), 1),
            components={"made": made},
        )

    # --- the whole run -----------------------------------------------------------------------------------------------

    def run(self) -> FinishRun:
        self.join_all()
        self.present |= {*self.tables.processes.of_kind["rollout"]}
        for _ in range(20_000):
            if self.tables.phase is RunPhase.FINISHED:
                finish = self.done[-1]
                assert isinstance(finish, FinishRun)
                if not isinstance(finish.error, ServiceLost) or self.is_interrupted:
                    return finish
                self.begin_attempt()
            if not self.go_on():
                break
        raise AssertionError(f"the run stands still in step {self.tables.step}, {self.tables.phase.value}")

    def trained(self) -> list[int]:
        """Steps that ranks were asked to train, without the times that samples were missing."""
        asked = [a.step for a in self.commands if isinstance(a, SentBatch) and a.process == "trainer-0"]
        for step, count in self.num_missing.items():
            for _ in range(count):
                asked.remove(step)
        return asked


def make(
    seed: int,
    *,
    has_room: bool = True,
    loses_others: bool = False,
    comes_and_goes: bool = False,
    streams: bool = False,
    agenda: type[RuleAgenda[SchedulerTables]] | None = None,
) -> Harried:
    """A run of which everything is drawn from its number. The agenda of every third is checked, which takes time."""
    draw = random.Random(seed)
    spec = msgspec.structs.replace(
        GRPO,
        expected={"trainer": 2, "rollout": NUM_ENGINES, "refit": 1},
        last_step=LAST_STEP,
        max_trajectory_age_steps=draw.choice([0, 1, 1, 2, 3, 4]),
        updates_in_flight=draw.random() < 0.5,
        max_replacements=1000,
        max_stored_tokens=None if has_room else draw.randint(8, 80),
        balance=draw.choice([None, EngineBalance(width=3, timeout_s=None), EngineBalance(width=4, timeout_s=9.0)]),
        dynamic_sampling=draw.choice([None, None, DynamicSampling(num_groups=4, max_batches=5)]),
        validate_at_start=draw.random() < 0.5,
        save_every=draw.choice([0, 2]),
        engines_first=seed % 2 == 0,
        deadlines=FOREVER,
    )
    if streams:
        streaming = StreamingTraining(min_groups=draw.choice([1, 2]))
        spec = msgspec.structs.replace(spec, streaming=streaming, dynamic_sampling=None, engines_first=False)
    troubles = Troubles(
        loss=draw.choice([0.0, 0.01, 0.05]),
        trainer_loss=draw.choice([0.0, 0.002, 0.01]) if loses_others else 0.0,
        service_loss=draw.choice([0.0, 0.01, 0.05]) if loses_others else 0.0,
        partial=draw.choice([0.0, 0.3]),
        wrong=draw.choice([0.0, 0.3]),
        missing=draw.choice([0.0, 0.3]),
        tick=draw.choice([0.01, 0.1]),
    )
    if comes_and_goes:
        rates = {
            "join": draw.choice([0.005, 0.02]),
            "leave": draw.choice([0.005, 0.02]),
            "hangs": draw.choice([0.0, 0.1]),
            "nobody_comes": draw.choice([0.0, 0.3]),
        }
        troubles = msgspec.structs.replace(troubles, **rates)
    cluster = Harried(seed, spec, troubles, agenda or (RuleAgenda if seed % 3 else Checked))
    if draw.random() < 0.5:
        cluster.adjust = with_mesh
    return cluster


def with_mesh(reply: Reply) -> Reply:
    """Have two of the engines in a mesh."""
    if not isinstance(reply, TransfersPlanned):
        return reply
    return msgspec.structs.replace(reply, transfer_groups=MESHES, senders=("trainer-0", "rollout-0", "rollout-1"))


CHUNK = 8


@pytest.mark.parametrize("chunk", range(8))
def test_trainers_may_be_given_groups_as_they_come_whatever_is_lost(chunk: int) -> None:
    num_streamed = 0
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        cluster = make(seed, streams=True, loses_others=seed % 2 == 1, comes_and_goes=seed % 4 == 2)
        if seed % 8 == 7:
            cluster.troubles = msgspec.structs.replace(cluster.troubles, interrupt=0.003)
        finish = cluster.run()
        assert finish.outcome == ("interrupted" if cluster.is_interrupted else "finished"), f"seed {seed}: {finish}"
        num_streamed += len(cluster.streamed)
        if not cluster.is_interrupted:
            assert cluster.commits()[-LAST_STEP:] == list(range(1, LAST_STEP + 1)), f"seed {seed}"
    assert num_streamed > CHUNK


@pytest.mark.parametrize("chunk", range(12))
def test_every_step_is_done_once_with_samples_of_proven_weights(chunk: int) -> None:
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        cluster = make(seed)
        assert cluster.run() == FinishRun(outcome="finished"), f"seed {seed}"
        first = 0 if cluster.tables.spec.validate_at_start else 1
        assert cluster.commits() == list(range(first, LAST_STEP + 1)), f"seed {seed}"
        assert cluster.trained() == list(range(1, LAST_STEP + 1)), f"seed {seed}"
        recorded = {action.version for action in cluster.done if isinstance(action, RecordRefit)}
        assert recorded >= set(range(LAST_STEP)), f"seed {seed}"
        assert recorded >= cluster.verified, f"seed {seed}"


@pytest.mark.parametrize("stream", range(3))
def test_what_is_proven_is_recorded_whenever_engines_are_lost(stream: int) -> None:
    """Other troubles for the same runs: some lose a version with every engine that holds it, before it is proven."""
    for seed in (18, 27, 30, 47, 65, 76):
        cluster = make(seed)
        cluster.random = random.Random(f"{stream}/{seed}")
        cluster.troubles = msgspec.structs.replace(cluster.troubles, loss=0.05, wrong=0.3)
        assert cluster.run() == FinishRun(outcome="finished"), f"seed {seed}"
        recorded = {action.version for action in cluster.done if isinstance(action, RecordRefit)}
        assert recorded >= cluster.verified, f"seed {seed}"


@pytest.mark.parametrize("chunk", range(6))
def test_every_step_is_done_once_however_often_trainers_and_the_refit_service_are_lost(chunk: int) -> None:
    num_terms, num_services = 0, 0
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        cluster = make(seed, loses_others=True)
        assert cluster.run() == FinishRun(outcome="finished"), f"seed {seed}"
        assert cluster.commits()[-LAST_STEP:] == list(range(1, LAST_STEP + 1)), f"seed {seed}"
        assert cluster.trained() == list(range(cluster.tables.spec.first_step, LAST_STEP + 1)), f"seed {seed}"
        ids = [
            cluster.id_of(action) for action in cluster.done if isinstance(action, DispatchCommand | DispatchPrompts)
        ]
        assert len(ids) == len({*ids}), "no id is given twice, in whatever term"
        num_terms += cluster.num_terms
        num_services += sum(isinstance(a, ReplaceEngine) and a.process == "refit-0" for a in cluster.done)
    assert num_terms > CHUNK, "trainers were lost"
    assert num_services > 0, "and so was the service"


@pytest.mark.parametrize("chunk", range(4))
def test_every_step_is_done_once_whichever_engines_come_and_go(chunk: int) -> None:
    num_joined = num_let_go = 0
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        cluster = make(seed, comes_and_goes=True, loses_others=chunk % 2 == 1)
        assert cluster.run() == FinishRun(outcome="finished"), f"seed {seed}"
        assert cluster.commits()[-LAST_STEP:] == list(range(1, LAST_STEP + 1)), f"seed {seed}"
        assert cluster.trained() == list(range(cluster.tables.spec.first_step, LAST_STEP + 1)), f"seed {seed}"
        num_joined += cluster.num_joined
        num_let_go += cluster.num_let_go
    assert num_joined > 0
    assert num_let_go > CHUNK


@pytest.mark.parametrize("chunk", range(4))
def test_an_interrupt_at_any_moment_ends_the_run_with_what_was_trained_saved(chunk: int) -> None:
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        cluster = make(seed)
        cluster.tables.spec = cluster.tables.saving._spec = msgspec.structs.replace(cluster.tables.spec, save_every=2)
        cluster.troubles = msgspec.structs.replace(cluster.troubles, interrupt=0.005)
        finish = cluster.run()
        assert finish == FinishRun(outcome="interrupted" if cluster.is_interrupted else "finished"), f"seed {seed}"
        done = cluster.commits()
        assert done == list(range(done[0] if done else 0, len(done) + (done[0] if done else 0))), f"seed {seed}"
        assert cluster.trained() == [step for step in done if step], f"seed {seed}"
        saved = [action.step for action in cluster.done if isinstance(action, PublishCheckpoint)]
        assert not cluster.trained() or saved[-1] == done[-1], f"seed {seed}"


@pytest.mark.parametrize("chunk", range(2))
def test_stores_that_are_full_hold_nothing_up_for_ever(chunk: int) -> None:
    outcomes: set[str] = set()
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        cluster = make(seed, has_room=False)
        finish = cluster.run()
        outcomes.add(finish.outcome)
        assert finish.error is None or "raise policy.generation.max_stored_tokens" in str(finish.error), f"seed {seed}"
        assert finish.error is not None or cluster.commits()[-1] == LAST_STEP
    assert outcomes == {"finished", "failed"}


@pytest.mark.parametrize(
    "troubles",
    [{}, {"has_room": False}, {"loses_others": True}, {"comes_and_goes": True}, {"interrupt": True}],
    ids=lambda troubles: next(iter(troubles), "engines"),
)
def test_the_agenda_decides_as_asking_every_rule_does_event_by_event(troubles: dict[str, bool]) -> None:
    options = {name: is_on for name, is_on in troubles.items() if name != "interrupt"}
    for seed in range(200, 206):
        asking_those_due, asking_all = [
            make(seed, agenda=agenda, **options) for agenda in (RuleAgenda[SchedulerTables], AskEverything)
        ]
        for cluster in (asking_those_due, asking_all):
            if "interrupt" in troubles:
                cluster.troubles = msgspec.structs.replace(cluster.troubles, interrupt=0.005)
            cluster.run()
        for number, (one, other) in enumerate(zip(asking_those_due.log, asking_all.log, strict=True)):
            assert repr(one) == repr(other), f"seed {seed}, event {number}"


@pytest.mark.parametrize("kind", ["trainer-1", "refit-0"])
def test_who_cannot_be_replaced_ends_the_run_whatever_goes_on(kind: str) -> None:
    for seed in range(CHUNK):
        cluster = make(seed)
        cluster.join_all()
        for _ in range(cluster.random.randrange(40, 200)):
            cluster.go_on()
        phase = cluster.tables.phase
        cluster.tables.replacements = CountedReplacements(0, 3600.0)
        actions = cluster.give(ProcessLost(now=cluster.now, process=kind, reason="killed by SIGKILL"))
        while cluster.tables.phase is RunPhase.WRITING:
            cluster.go_on()
        finish = cluster.done[-1]
        assert isinstance(finish, FinishRun), f"seed {seed}: {actions}"
        assert str(finish.error).startswith(f"{kind} failed while {phase.value}"), f"seed {seed}: {finish.error}"
