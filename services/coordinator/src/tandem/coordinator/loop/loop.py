"""The loop that carries out what the scheduler decides.

It consumes the registry's events, deaths of launched processes, the clock, and signals such as Ctrl-C. It makes events
of what is none yet, hands all to `tandem.coordinator.scheduler`, and carries out the actions that come back: requests
to processes, journal commits, published checkpoints. It waits at most `_POLL_S` at a time, in the registry. The
scheduler has a deadline for every process that owes an answer, so the loop never waits for ever.

`StepBatches` makes a step's batch and each trainer's command. Ranks fetch the tokens of generated samples from the
rollouts, so nothing there grows with tokens; of a data set, each rank is sent those of its own shard.

`ProcessLosses` brings something in the place of processes that a run has lost, or lets go.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, assert_never

import msgspec
from numpy.typing import NDArray

from tandem.common import messages
from tandem.common.signals import ASKED_ONCE_S
from tandem.common.wire import Arrays, Frames, encode
from tandem.config import Config
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.loop.recorder import RefitMetrics, ResultRecorder, StepMetrics
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler, events
from tandem.launch.known_processes import KnownProcesses
from tandem.launch.launch import LocalProcesses
from tandem.samples.batch import MEDIA, TABLE, TOKENS, SampleBatch, is_of_table
from tandem.samples.batch_sharding import BatchSharding, data_parallel_ranks

_HEARD = "interrupted: finishing or abandoning the step; press Ctrl-C again to stop at once"


class PendingInterrupts:
    """Pending requests to end the run. The first ends it after the step, the second at once."""

    def __init__(self) -> None:
        self._signals: deque[tuple[int, float]] = deque()
        """Signals not yet looked at, with the times they came."""
        self._pending: deque[str] = deque()
        self._heard_at = -math.inf
        self.is_goal_reached = False
        """Whether the end was asked for because the run has reached its goal."""

    def hear(self, number: int) -> None:
        """Take a signal; called where signals are handled."""
        # Nothing is decided here: the next signal may interrupt this call.
        self._signals.append((number, time.monotonic()))

    def ask(self, reason: str) -> None:
        """Ask for the end of the run in place of a signal, and say why; a run that is ending is left alone."""
        if not self.were_heard:
            self._pending.append(reason)

    def reach(self, reason: str) -> None:
        """Ask for the end of the run because it has reached its goal, and say why."""
        self.is_goal_reached = True
        self.ask(reason)

    @property
    def were_heard(self) -> bool:
        """Whether a signal has asked for the end."""
        return bool(self._signals) or self._heard_at > -math.inf

    @property
    def are_there(self) -> bool:
        """Whether a request is pending, or a signal that may be one."""
        return bool(self._signals or self._pending)

    def take(self) -> str | None:
        """Take one request and return its reason; return None if there is none."""
        while self._signals:
            number, at = self._signals.popleft()
            # `timeout` and systemd ask twice at once; only the user's second Ctrl-C means it.
            if number == signal.SIGINT or at - self._heard_at > ASKED_ONCE_S:
                self._pending.append(_HEARD)
            self._heard_at = at
        return self._pending.popleft() if self._pending else None


_NOT_BACK = "it has not come back after the coordinator was lost"
_LEAVES_S = 10.0
"""Time for a launched process to end once it is dismissed."""


class ProcessLosses:
    """The processes that an attempt has lost, and the replacements of some."""

    def __init__(
        self,
        registry: ProcessRegistry,
        processes: LocalProcesses,
        recorder: ResultRecorder,
        handle: Callable[[events.Event], None],
    ) -> None:
        """`handle` gives the scheduler an event."""
        self._registry = registry
        self._processes = processes
        self._recorder = recorder
        self._handle = handle
        self.lost: dict[str, str] = {}
        """Lost processes that have not been replaced yet, by name, with the reason."""
        self.replaced_at: list[float] = []
        """Times of replacements, by `time.monotonic`."""

    def replace_missing(self) -> None:
        """Replace processes that have not come back to this coordinator, once everything received is handled."""
        for name in self._registry.not_back():
            if self._registry.names.needs(name):
                self.lost[name] = _NOT_BACK
                self._replace(name, _NOT_BACK)
            else:
                self._registry.dismiss(name, _NOT_BACK, is_over=True, is_awaited=False)
                self._recorder.note(f"{name} is lost: {_NOT_BACK}")

    def do_without(self, action: events.ReplaceEngine | events.LetGo) -> None:
        """Let the run go on without a process, or with another in its place."""
        match action:
            case events.ReplaceEngine(process=process, reason=reason):
                self._replace(process, reason)
            case events.LetGo():
                self._let_go(action)

    def _replace(self, process: str, reason: str) -> None:
        """Launch a process in the place of a lost one, or ask for one if the lost one was started by hand."""
        self.lost.pop(process, None)  # one that missed a deadline is not in it
        self.replaced_at.append(time.monotonic())
        self._registry.dismiss(process, f"it is replaced: {reason}")
        self._recorder.observers.lost(process)
        self._recorder.observers.replaced(1)
        launched = self._processes.restart([process])
        if not launched:
            remedy = f"start another: {self._registry.describe_joining(process.rpartition('-')[0])}"
            self._handle(events.AwaitedByHand(now=time.monotonic(), process=process))
        else:
            self._registry.names.reserve(*launched)
            remedy = "another is launched in its place"
        self._recorder.note(f"{process} is lost: {reason}; {remedy}")

    def _let_go(self, action: events.LetGo) -> None:
        """Dismiss an engine that is not replaced by a launched one."""
        process = action.process
        self.lost.pop(process, None)
        self._registry.dismiss(process, action.reason, is_over=True, is_awaited=action.is_awaited)
        self._processes.let_go(process, _LEAVES_S)
        self._recorder.observers.lost(process)
        remedy = (
            f"; the run waits for another: {self._registry.describe_joining('rollout')}" if action.is_awaited else ""
        )
        self._recorder.note(f"{process} leaves the run: {action.reason}{remedy}")


class MadeBatch(NamedTuple):
    """A step's batch, and what is sent of it."""

    batch: SampleBatch
    """Its sequences, each with the data-parallel rank that trains on it."""
    metrics: dict[str, float]
    """Metrics of its samples."""
    commands: list[tuple[str, messages.Train | messages.Evaluate, dict[str, NDArray[Any]]]]
    """The command of each trainer, with its arrays."""


class StepBatches:
    """The batches of a run's steps, as trainers get them."""

    def __init__(
        self, config: Config, algorithm: RunningAlgorithm, sources: Mapping[str, messages.Listener] = {}
    ) -> None:
        """Take the configuration, the algorithm, and the addresses of samples outside rollouts, by source name."""
        self._ranks = data_parallel_ranks(config)
        """Data-parallel rank of each trainer that holds the policy, by its index."""
        self._config = config
        self._algorithm = algorithm
        self._sharding = BatchSharding.of(config, shares_prompts=False)
        self._listeners = dict(sources)
        """Address of each rollout's samples."""

    def take_reply(self, process: str, reply: messages.EngineBuilt | messages.TrainerBuilt) -> None:
        """Take from a reply what matters here."""
        match reply:
            case messages.EngineBuilt(samples_at=listener):
                self._listeners[process] = listener
            case messages.TrainerBuilt(shares_prompts=shares_prompts) if _index_of(process) < len(self._ranks):
                self._sharding = BatchSharding.of(self._config, shares_prompts=shares_prompts)
            case messages.TrainerBuilt():  # it does not hold the policy
                pass

    def make(self, action: events.DispatchBatch, records: Sequence[events.SampleRecord]) -> MadeBatch:
        """Make the batch of a step, and each trainer's command.

        `records` are the samples in it, in order; none for an algorithm over a data set.
        """
        batch, metrics = self._algorithm.batch(action.step, action.purpose, records)
        parts = self._algorithm.validation_parts if action.purpose == "validate" else {}
        batch = self._sharding.shard(batch, [*parts.values()])
        sources = {rollout: self._listeners[rollout] for rollout in batch.sources}
        table = {name: array for name, array in batch.columns.items() if is_of_table(name)}
        tokens = shards_of(batch, self._config.data_parallel_size) if "token_ids_T" in batch.columns else []
        commands: list[tuple[str, messages.Train | messages.Evaluate, dict[str, NDArray[Any]]]] = []
        for trainer, fields in action.commands.items():
            command: messages.Train | messages.Evaluate
            if action.purpose == "train":
                command = messages.Train(**fields, step=action.step, sources=sources)
            else:
                command = messages.Evaluate(**fields, step=action.step, sources=sources, parts=parts)
            token_columns: dict[str, NDArray[Any]] = {}
            if tokens and (index := _index_of(trainer)) < len(self._ranks):
                token_columns = tokens[self._ranks[index]]
            elif tokens:  # it has no shard without the policy: the trainers of the policy send its model tokens
                token_columns = {name: array[:0] for name, array in tokens[0].items()}
            commands.append((trainer, command, table | token_columns))
        return MadeBatch(batch, metrics, commands)


def shards_of(batch: SampleBatch, num_ranks: int) -> list[dict[str, NDArray[Any]]]:
    """Return what each data-parallel rank is sent beside the table of a batch: the tokens of its own sequences."""
    names = (*TOKENS, *(name for name in MEDIA if name in batch.columns))
    shards = [batch.only(names).take(batch.rows_of(rank)).columns for rank in range(num_ranks)]
    return [{name: array for name, array in shard.items() if name not in TABLE} for shard in shards]


def _index_of(trainer: str) -> int:
    return int(trainer.rpartition("-")[2])


_CAUSE_S = 0.5
"""Time after an error within which the death of a process that caused it may show."""
_POLL_S = 0.1
_RELEASE_S = 60.0
"""Deadline of a request that nothing waits for."""
_RESEND_AFTER = 0.5
"""Fraction of its deadline after which an unanswered request is sent again; receivers know repeats by their id."""


class RunParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that last through all attempts of a run: its processes, and requests to end it."""

    registry: ProcessRegistry
    processes: LocalProcesses
    interrupts: PendingInterrupts
    known_processes: KnownProcesses
    observers: tuple[Observer, ...]
    """Observers that last as long."""


class SentRequest(msgspec.Struct, frozen=True):
    """A request on its way, kept until it is answered."""

    process: str
    frames: Frames
    resend_at: float


class CoordinatorLoop:
    """One attempt of a run: it carries out a scheduler's decisions until the run ends or cannot go on."""

    def __init__(
        self,
        scheduler: Scheduler,
        lasting: RunParts,
        algorithm: RunningAlgorithm,
        batches: StepBatches,
        recorder: ResultRecorder,
        find_restored: Callable[[], Mapping[events.Place, events.RestoredGroup]],
    ) -> None:
        """`find_restored` finds restored groups, generated before, to train on."""
        self.scheduler = scheduler
        self.recorder = recorder
        self._observers = recorder.observers
        self._registry = lasting.registry
        self._processes = lasting.processes
        self._interrupts = lasting.interrupts
        self._algorithm = algorithm
        self._batches = batches
        spec = scheduler.tables.spec
        self._begin_metrics = partial(
            StepMetrics, is_asynchronous=not spec.is_synchronous, without_policy=spec.without_policy
        )
        self._step_metrics = self._begin_metrics()
        self._refits = RefitMetrics()
        self._sent: dict[int, SentRequest] = {}
        self._generated: dict[str, dict[int, int]] = {}
        """Requests to generate, with the step that trains on their samples; engines may still keep these."""
        self._find_restored = find_restored
        self._finish: events.FinishRun | None = None
        self.poll_s = _POLL_S
        """Longest wait for messages."""
        self.losses = ProcessLosses(lasting.registry, lasting.processes, recorder, self._handle)

    def run(self) -> events.FinishRun:
        """Run until the scheduler finishes; return its outcome."""
        for joined in self._registry.begin_attempt():
            self._handle(joined)
        while self._finish is None:
            for event in self._events():
                self._keep(event)
                self._handle(event)
            if self._registry.names.expected_until < time.monotonic() and self._finish is None:
                self.losses.replace_missing()
            self._observers.show(self.scheduler, self._registry)
            for line in self._observers.take_news():
                self.recorder.note(line)
        return self._finish

    def _handle(self, event: events.Event) -> None:
        """Give the scheduler an event, and carry out the actions that it leads to.

        An action that is answered at once, such as `DrawPrompts`, gives it the answer from within: the actions that the
        answer leads to are carried out before the rest of the first ones.
        """
        if isinstance(event, events.ProcessLost):
            self.losses.lost[event.process] = event.reason
        actions = self.scheduler.handle(event)
        self._observers.handled(event, self.scheduler)
        for action in actions:
            self._carry_out(action)
        if self._interrupts.are_there and any(isinstance(action, events.CommitStep) for action in actions):
            # Before the next step can train, which this one may have made needless.
            for interrupted in self._interrupted():
                self._handle(interrupted)

    def _interrupted(self) -> Iterator[events.StopRequested]:
        """Take the requests to end the run."""
        while (reason := self._interrupts.take()) is not None:
            self.recorder.note(reason)
            yield events.StopRequested(now=time.monotonic())

    def _events(self) -> Iterator[events.Event]:
        """Wait for events, `poll_s` at most, and end with a tick."""
        errors: dict[str, events.CommandErred] = {}
        leaving: list[events.EngineDraining] = []
        for event in self._registry.receive(self.poll_s):
            if isinstance(event, events.CommandErred):
                errors[event.process] = event
            elif isinstance(event, events.EngineDraining):
                leaving.append(event)
            else:
                yield event
        lost = self._losses(_CAUSE_S if errors else 0.0)
        now = time.monotonic()
        # First: a signal to all processes also ended some, and others now fail because of that.
        if self._interrupts.are_there:
            yield from self._interrupted()
        yield from leaving
        if lost or errors:
            # A process that fails because another died is heard before that death is seen, and is not to blame.
            yield from (event for event in lost if event.process not in errors)
            yield from errors.values()
            yield from (event for event in lost if event.process in errors)
        self._resend(now)
        yield events.TimePassed(now=now)

    def _losses(self, patience_s: float) -> list[events.ProcessLost]:
        """Return the launched processes that died, waiting up to `patience_s` for the first to be seen."""
        deadline = time.monotonic() + patience_s
        while not (dead := self._processes.died()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not dead:
            return []
        now = time.monotonic()
        return [
            events.ProcessLost(now=now, process=launched.name, reason=launched.describe_death()) for launched in dead
        ]

    def _keep(self, event: events.Event) -> None:
        """Keep the content of a reply, besides the fact that it came."""
        if isinstance(event, events.CommandErred):
            self._observers.answered(event.process, event.failed, event.now)
        if not isinstance(event, events.ProcessReplied) or event.reply.command_id not in self.scheduler.tables.requests:
            return
        match event.reply:
            case messages.SamplesFinished() as finished:
                self.recorder.note_failures(finished.samples)
                return  # more answers follow; the scheduler keeps the samples' records
            case messages.Trained() as trained:
                self._step_metrics.trained(event.process, trained)
                self._note(trained.step, trained.notes)
            case messages.Evaluated() as evaluated:
                self._step_metrics.evaluated(evaluated)
                self._note(evaluated.step, evaluated.notes)
            case messages.Generated() as generated:
                self._step_metrics.generated(generated)
            case messages.Refitted() as refitted:
                self._step_metrics.refitted(event.process, refitted)
                self._refits.refitted(refitted)
            case messages.DigestsReported() as verified:
                self._refits.verified(verified)
            case messages.EngineBuilt() as built:
                self._batches.take_reply(event.process, built)
            case messages.TrainerBuilt() as built:
                self._batches.take_reply(event.process, built)
                self.recorder.note(f"{event.process} holds a model of {built.num_parameters / 1e6:.1f}M parameters")
            case messages.CheckpointCopied(why_waited=reason) if reason and event.process == "trainer-0":
                self.recorder.note(f"training has waited for a checkpoint to be written: {reason}")
            case _:
                pass
        self._observers.answered(event.process, event.reply, event.now)
        self._sent.pop(event.reply.command_id, None)

    def _note(self, step: int, notes: Iterable[str]) -> None:
        """Show notes about a step's numbers."""
        for text in notes:
            self.recorder.note(f"step {step}: {text}")

    # --- actions -----------------------------------------------------------------------------------------------------

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.DispatchCommand(process=process, command=command):
                self._send(process, command, None)
            case events.DrawPrompts():
                self._draw(action)
            case events.FindRestored():
                self._handle(events.RestoredFound(now=time.monotonic(), groups=self._find_restored()))
            case events.DispatchPrompts():
                self._send_prompts(action)
            case events.DispatchBatch() | events.DispatchGroups():
                self._send_batch(action)
            case events.DispatchRecord() | events.StepValidated() | events.StepRecorded() | events.DropRestored():
                self._keep_record(action)
            case events.DiscardSamples():
                self.recorder.record_discarded(action)
            case events.ReplaceEngine() | events.LetGo():
                self._generated.pop(action.process, None)
                self.losses.do_without(action)
            case events.RecordRefit():
                self.recorder.record_refit(action, self._refits)
                self._refits = RefitMetrics()
            case events.PublishCheckpoint(step=step):
                self.recorder.publish_checkpoint(step)
            case events.CommitStep():
                self._commit(action)
            case events.TellUser(text=text):
                self.recorder.note(text)
            case events.FinishRun():
                self._finish = action
            case unhandled:
                assert_never(unhandled)

    def _draw(self, action: events.DrawPrompts) -> None:
        """Draw rollout groups, and tell the scheduler what each demands of an engine."""
        step, purpose = action.step, action.purpose
        longest = self._algorithm.sampling(purpose).max_new_tokens
        groups = self._algorithm.prompt_groups(step, purpose, action.groups)
        sizes: list[events.GroupSize] = []
        for group in groups:
            num_tokens = len(group.prompt_ids) + longest
            sizes.append(events.GroupSize(num_samples=len(group.seeds), num_tokens=num_tokens))
        self._handle(events.PromptsDrawn(now=time.monotonic(), step=step, purpose=purpose, sizes=tuple(sizes)))

    def _send(self, process: str, command: messages.AnyCommand, arrays: Arrays | None) -> None:
        if isinstance(command, messages.RestoreSamples) or (
            isinstance(command, messages.Generate) and command.purpose == "train"
        ):
            self._generated.setdefault(process, {})[command.command_id] = command.step
        frames = encode(command, arrays)
        resend_at = time.monotonic() + _RESEND_AFTER * command.deadline_s
        self._sent[command.command_id] = SentRequest(process, frames, resend_at)
        self._observers.sent(process, command, time.monotonic())
        self._registry.command(process, command, frames)

    def _resend(self, now: float) -> None:
        """Send unanswered requests once more, in case their connection broke on the way."""
        for command_id, sent in [*self._sent.items()]:
            if command_id not in self.scheduler.tables.requests:
                del self._sent[command_id]
            elif now > sent.resend_at:
                self._registry.send(sent.process, sent.frames)
                self._sent[command_id] = msgspec.structs.replace(sent, resend_at=float("inf"))

    def _send_prompts(self, action: events.DispatchPrompts) -> None:
        command = messages.Generate(
            command_id=action.command_id,
            deadline_s=action.deadline_s,
            cancel_before=action.cancel_before,
            step=action.step,
            purpose=action.purpose,
            sampling=self._algorithm.sampling(action.purpose),
            groups=self._algorithm.prompt_groups(action.step, action.purpose, action.groups),
        )
        self._send(action.process, command, None)

    def _send_batch(self, action: events.DispatchBatch | events.DispatchGroups) -> None:
        """Make a step's batch, and send each trainer its command; keep the samples in it if they are to be logged."""
        assert isinstance(action, events.DispatchBatch), "others are for a loop that streams groups"
        of_step = self.scheduler.tables.groups.of_step(action.step, action.purpose)
        records = [] if of_step is None else of_step.records()
        batch, metrics, commands = self._batches.make(action, records)
        self._step_metrics.metrics.update(metrics)
        self._note(action.step, batch.notes)
        for process, command, arrays in commands:
            self._send(process, command, arrays)
        if self.scheduler.tables.spec.samples_folder:
            self.recorder.keep_samples(action.step, action.purpose, records, batch)

    def _keep_record(
        self, action: events.DispatchRecord | events.StepValidated | events.StepRecorded | events.DropRestored
    ) -> None:
        """Carry out an action on the rollout log."""
        match action:
            case events.DispatchRecord():
                self._send(action.process, self.recorder.record_command(action), None)
            case events.StepValidated():
                self.recorder.keep_samples(action.step, "validate", action.records)
            case events.StepRecorded():
                self.recorder.take_recorded(action)
            case events.DropRestored():
                self.recorder.drop_restored(action)

    def _commit(self, action: events.CommitStep) -> None:
        """Show validation samples, write the step to the journal, and let engines drop its samples."""
        if action.validated:
            for line in self._algorithm.describe(self.recorder.examples(action.step, action.validated)):
                self.recorder.note(line)
            self._step_metrics.metrics.update(self._algorithm.validation_metrics(action.validated))
        self._step_metrics.metrics.update(action.metrics)
        self.recorder.commit(action, self._step_metrics)
        self._step_metrics = self._begin_metrics()
        # Only now may engines drop the samples of this step, and of those before.
        for process, commands in self._generated.items():
            finished: list[int] = []
            for command_id, step in [*commands.items()]:
                if step <= action.step:
                    del commands[command_id]
                    finished.append(command_id)
            if finished:
                release = messages.ReleaseSamples(
                    command_ids=tuple(finished), **self.scheduler.tables.requests.notice(_RELEASE_S)
                )
                self._registry.send(process, encode(release))
