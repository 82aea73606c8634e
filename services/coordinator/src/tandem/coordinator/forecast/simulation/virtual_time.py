"""The real scheduler in virtual time: engines, trainers and refits that take what their rates say.

    events ─▶ `Scheduler.handle` ─▶ commands ─▶ what they take is due later, in virtual time ─▶ replies ─▶ events

An engine runs its sequences together, one token of each in a decoding step. Steps take longer with more cached tokens,
evenly so, which makes the time until the next sequence ends a quadratic equation: an engine costs an event for each
sequence, not for each token. Where the cache is full, the youngest sequence waits, and is prefilled again, as in vLLM.
All trainer ranks act as one. A lost engine makes nothing until it is noticed, and a replacement takes its place, both
after given seconds. No socket, clock, thread or array is involved.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from tandem.common import messages
from tandem.common.errors import ServiceError
from tandem.coordinator.forecast.simulation.lengths import GroupLengths
from tandem.coordinator.forecast.simulation.roofline import DecodingRate, StepSeconds
from tandem.coordinator.scheduler import RunSpec, Scheduler, events

_MEMORY = messages.MemoryUse(peak=0, held=0)
_KEY = "0" * 40
_NEVER = math.inf
_ROUNDING = 1e-6
"""Parts of a decoding step that are lost to rounding."""


class EngineRates(Protocol):
    """Seconds of an engine's work."""

    def decode(self, num_sequences: int) -> DecodingRate:
        """Return the seconds of a decoding step of so many sequences."""
        ...

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds of prompts."""
        ...

    @property
    def max_tokens(self) -> float:
        """Tokens that the cache holds."""
        ...


class VirtualRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of all processes, in seconds of virtual time."""

    engine: EngineRates
    num_places: int
    """Sequences that an engine runs at once."""
    train: Callable[[Sequence[int]], StepSeconds]
    """Seconds of a step, by the tokens of its sequences."""
    refit_s: float = 0.0
    verify_s: float = 0.0
    between_s: float = 0.0
    """Seconds of each step between generation and training, in which trainers wait."""
    losses_per_hour: float = 0.0
    """Engines that are lost in an hour, in the whole run."""
    notice_s: float = 0.0
    """Seconds until a loss is noticed."""
    replace_s: float = 0.0
    """Seconds from then on until a replacement has its weights to come."""


class SimulatedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, in virtual time."""

    ended_at: float
    by_phase: dict[str, float]
    """Seconds by phase of the scheduler's own stopwatch, with their ``total``."""
    logprobs_s: float
    training_s: float
    num_tokens: int
    """Tokens of its sequences, prompts included."""
    longest_over_mean: float


class _Sequence:
    """A sample on its way through an engine."""

    __slots__ = ("cached", "command", "ends_at", "group", "length", "place", "prompt", "starts_at", "version")

    def __init__(self, command: events.DispatchPrompts, group: int, place: int, prompt: int, length: int) -> None:
        self.command, self.group, self.place = command, group, place
        self.prompt, self.length = prompt, length
        self.starts_at = self.ends_at = 0.0
        """Decoding steps of its engine when it begins, and ends."""
        self.cached = prompt
        """Tokens that are prefilled when it begins, or begins again."""
        self.version = -1


class VirtualEngine:
    """Sequences that are decoded together; those that come first, first."""

    def __init__(self, rates: EngineRates, num_places: int) -> None:
        self._rates, self._num_places = rates, num_places
        self.waiting: deque[_Sequence] = deque()
        self._running: list[tuple[float, int, _Sequence]] = []
        """A heap by `_Sequence.ends_at`."""
        self._numbers = itertools.count()
        self._at = 0.0
        self._clock = 0.0
        """Decoding steps so far."""
        self._cached = 0.0
        """Tokens of the running sequences, prompts included."""
        self._prefill_s = 0.0
        """Prefilling to come before the next decoding step."""
        self._prefilled: tuple[int, int] = (-1, -1)
        self.is_paused = False
        self.version = 0
        self.versions: list[tuple[float, int]] = [(0.0, 0)]
        """Decoding steps from which on a version was there, for those that a running sequence may need."""
        self.num_turns = 0
        """Changes of its state: what was due before one is void."""
        self.busy_s = 0.0
        """Seconds in which a sequence ran."""
        self.place_s = 0.0
        """Seconds of all sequences that ran."""

    @property
    def num_running(self) -> int:
        """Sequences that run now."""
        return len(self._running)

    def advance(self, now: float) -> None:
        """Let time pass until `now`, which no sequence ends before."""
        elapsed, self._at = now - self._at, now
        if self.is_paused or not self._running or elapsed <= 0:
            return
        self.busy_s += elapsed
        self.place_s += elapsed * len(self._running)
        prefilling = min(elapsed, self._prefill_s)
        self._prefill_s -= prefilling
        elapsed -= prefilling
        if elapsed > 0:
            num = min(self._count_steps(elapsed), self._next_steps())
            self._clock += num
            self._cached += num * len(self._running)

    def fill(self) -> None:
        """Begin what waits, where there is room. Prompts of a group are prefilled once."""
        while self.waiting and len(self._running) < self._num_places:
            sequence = self.waiting[0]
            if self._running and self._cached + sequence.cached + len(self._running) > self._rates.max_tokens:
                return
            self.waiting.popleft()
            num_made = sequence.cached - sequence.prompt
            sequence.starts_at = self._clock - num_made
            sequence.ends_at = sequence.starts_at + sequence.length
            if sequence.version < 0:
                sequence.version = self.version
            heapq.heappush(self._running, (sequence.ends_at, next(self._numbers), sequence))
            self._cached += sequence.cached
            group = sequence.command.step, sequence.group
            if group != self._prefilled or num_made:
                self._prefilled = group
                self._prefill_s += self._rates.prefill_s(sequence.cached)

    def next_s(self) -> float:
        """Return the seconds until a sequence ends, or the cache is full."""
        if self.is_paused or not self._running:
            return _NEVER
        rate, num = self._rates.decode(len(self._running)), self._next_steps()
        cached = num * self._cached + len(self._running) * num * num / 2
        return self._prefill_s + num * rate.fixed_s + cached * rate.cached_s

    def take_ended(self) -> list[_Sequence]:
        """Return the sequences that end now. If none does, the cache is full: the youngest begins again later."""
        if not self._running:
            return []
        ended = []
        while self._running and self._running[0][0] <= self._clock + _ROUNDING:
            ended.append(heapq.heappop(self._running)[2])
            self._cached -= ended[-1].prompt + ended[-1].length
        if not ended and len(self._running) > 1 and self._cached >= self._rates.max_tokens - 1:
            self._preempt()
        if not self._running:
            self._cached = 0.0
        return ended

    def _next_steps(self) -> float:
        """Return the decoding steps until a sequence ends, or the cache is full."""
        num = max(0.0, self._running[0][0] - self._clock)
        if len(self._running) > 1:
            num = min(num, max(0.0, self._rates.max_tokens - self._cached) / len(self._running))
        return num

    def _preempt(self) -> None:
        """Have the youngest sequence wait, before all others."""
        youngest = max(range(len(self._running)), key=lambda index: self._running[index][1])
        sequence = self._running.pop(youngest)[2]
        heapq.heapify(self._running)
        num_made = self._clock - sequence.starts_at
        self._cached -= sequence.prompt + num_made
        sequence.cached = sequence.prompt + int(num_made)
        self.waiting.appendleft(sequence)

    def take_version(self, version: int) -> None:
        """Hold another version from now on."""
        self.version = version
        oldest = min((sequence.starts_at for _, _, sequence in self._running), default=self._clock)
        self.versions = [entry for entry in self.versions if entry[0] >= oldest]
        self.versions.append((self._clock, version))

    def count_by_version(self, sequence: _Sequence) -> list[int]:
        """Return the tokens of an ended sequence by the version that made them, from `_Sequence.version` on."""
        counts = [0]
        since = sequence.starts_at
        for at, version in self.versions:
            if version <= sequence.version or at >= sequence.ends_at:
                continue
            counts[-1] += round(at) - round(since)
            counts += [0] * (version - sequence.version + 1 - len(counts))
            since = at
        counts[-1] += sequence.length - sum(counts)
        return counts

    def stop(self, keep: Callable[[_Sequence], bool] = lambda sequence: False) -> None:
        """Forget all sequences but those to keep."""
        self.waiting = deque(filter(keep, self.waiting))
        running = [entry for entry in self._running if keep(entry[2])]
        if len(running) != len(self._running):
            self._running = running
            heapq.heapify(self._running)
            self._cached = sum(s.prompt + self._clock - s.starts_at for _, _, s in running)

    def _count_steps(self, seconds: float) -> float:
        """Return the decoding steps, in parts too, of so many seconds."""
        rate, num = self._rates.decode(len(self._running)), len(self._running)
        linear, square = rate.fixed_s + rate.cached_s * self._cached, rate.cached_s * num / 2
        if square * seconds < 1e-12 * linear * linear:
            return seconds / linear
        return (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)


def measure_generation(rates: EngineRates, num_places: int, groups: Sequence[GroupLengths]) -> float:
    """Return the seconds in which one engine alone generates groups that it is given at once."""
    engine, now = VirtualEngine(rates, num_places), 0.0
    for number, group in enumerate(groups):
        command = events.DispatchPrompts(
            process="rollout-0",
            command_id=1,
            deadline_s=_NEVER,
            step=1,
            purpose="train",
            groups=(number,),
            cancel_before=0,
        )
        sequences = (_Sequence(command, number, place, group.prompt, n) for place, n in enumerate(group.responses))
        engine.waiting.extend(sequences)
    engine.fill()
    while engine.num_running:
        now += engine.next_s()
        engine.advance(now)
        engine.take_ended()
        engine.fill()
    return now


class VirtualRun:
    """A whole run of the real scheduler, in virtual time."""

    def __init__(
        self,
        spec: RunSpec,
        rates: VirtualRates,
        draw: Callable[[int, int], GroupLengths],
        longest: int,
        seed: int = 0,
    ) -> None:
        """Take the lengths of a group by its step and number, and the most tokens of a sample."""
        self.rates, self._draw, self._longest = rates, draw, longest
        self.scheduler = Scheduler(spec, now=0.0)
        self._random = random.Random(seed)
        self.now = 0.0
        self.engines: dict[str, VirtualEngine] = {}
        self.steps: list[SimulatedStep] = []
        self.tokens_by_age: dict[int, int] = {}
        self.num_losses = 0
        self.num_too_old = 0.0
        self.outcome: events.FinishRun | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._unfinished: dict[int, int] = {}
        """Sequences of each command to generate that have not ended."""
        self._step_lengths: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        """Tokens of the prompt and response of each sample of a step, by group and place."""
        self._trained: dict[int, StepSeconds] = {}
        self._absent: set[str] = set()

    def run(self) -> None:
        """Run to the end. Raise `ServiceError` if the run fails, or `ConfigError` if it stands still."""
        spec = self.scheduler.tables.spec
        for kind, count in spec.expected.items():
            for index in range(count):
                self._handle(events.ProcessJoined(now=self.now, process=f"{kind}-{index}", kind=kind))
        if self.rates.losses_per_hour:
            self._after(self._next_loss_s(), self._lose_engine)
        while self.outcome is None:
            if not self._due:
                raise ServiceError("simulation", self.scheduler.tables.phase.value, "the run stands still")
            self.now, _, carry_out = heapq.heappop(self._due)
            carry_out()
        if self.outcome.error is not None:
            raise self.outcome.error

    # --- events and actions ------------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        for action in self.scheduler.handle(event):
            self._carry_out(action)

    def _after(self, seconds: float, carry_out: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), carry_out))

    def _reply_after(self, seconds: float, process: str, reply: messages.Reply) -> None:
        self._after(seconds, lambda: self._handle(events.ProcessReplied(now=self.now, process=process, reply=reply)))

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.DrawPrompts(step=step, purpose=purpose, groups=groups):
                sizes = tuple(self._size_of(step, group) for group in groups)
                self._after(
                    0.0,
                    lambda: self._handle(events.PromptsDrawn(now=self.now, step=step, purpose=purpose, sizes=sizes)),
                )
            case events.FindRestored():
                self._after(0.0, lambda: self._handle(events.RestoredFound(now=self.now, groups={})))
            case events.DispatchPrompts():
                self._generate(action)
            case events.DispatchBatch(step=step, commands=commands):
                self._train(step, {process: fields["command_id"] for process, fields in commands.items()})
            case events.DispatchCommand(process=process, command=command):
                self._command(process, command)
            case events.CommitStep():
                self._commit(action)
            case events.ReplaceEngine(process=process):
                self._after(
                    self.rates.replace_s,
                    lambda: self._handle(events.ProcessJoined(now=self.now, process=process, kind="rollout")),
                )
            case events.FinishRun():
                self.outcome = action
            case _:
                pass

    def _command(self, process: str, command: events.PlainCommand) -> None:
        seconds = 0.0
        if process in self._absent and not isinstance(command, messages.BuildEngine):
            return
        match command:
            case messages.BuildEngine():
                self.engines[process] = VirtualEngine(self.rates.engine, self.rates.num_places)
                self.engines[process].advance(self.now)
                self._absent.discard(process)
            case messages.Refit(version=version):
                seconds = self.rates.refit_s
                if process in self.engines:
                    self._pause(process, version, command.command_id)
                    return
            case messages.CopyWeights() | messages.ReportDigests():
                seconds = self.rates.verify_s if isinstance(command, messages.ReportDigests) else 0.0
            case _:
                pass
        self._reply_after(seconds, process, _answer(process, command))

    def _size_of(self, step: int, group: int) -> events.GroupSize:
        lengths = self._draw(step, group)
        of_step = self._step_lengths.setdefault(step, {})
        of_step |= {(group, place): (lengths.prompt, length) for place, length in enumerate(lengths.responses)}
        return events.GroupSize(num_samples=len(lengths.responses), num_tokens=self._longest)

    # --- trainers ----------------------------------------------------------------------------------------------------

    def _train(self, step: int, commands: dict[str, int]) -> None:
        lengths = [prompt + response for prompt, response in self._step_lengths[step].values()]
        seconds = self._trained[step] = self.rates.train(lengths)
        total = self.rates.between_s + seconds.logprobs_s + seconds.training_s
        for process, command_id in commands.items():
            self._reply_after(total, process, _trained(command_id, step))

    def _commit(self, action: events.CommitStep) -> None:
        trained = self._trained.pop(action.step, None)
        if trained is None:
            return
        lengths = self._step_lengths.pop(action.step)
        responses = [response for _, response in lengths.values()]
        self.num_too_old += action.metrics.get("groups_too_old", 0.0)
        self.steps.append(
            SimulatedStep(
                ended_at=self.now,
                by_phase=action.seconds,
                logprobs_s=trained.logprobs_s,
                training_s=trained.training_s,
                num_tokens=sum(map(sum, lengths.values())),
                longest_over_mean=max(responses) * len(responses) / sum(responses),
            )
        )

    # --- engines -----------------------------------------------------------------------------------------------------

    def _generate(self, action: events.DispatchPrompts) -> None:
        engine = self.engines[action.process]
        engine.advance(self.now)
        if action.cancel_before:
            engine.stop(lambda sequence: sequence.command.command_id >= action.cancel_before)
        num = 0
        for group in action.groups:
            lengths = self._step_lengths[action.step]
            place = 0
            while (key := (group, place)) in lengths:
                engine.waiting.append(_Sequence(action, group, place, *lengths[key]))
                place += 1
            num += place
        self._unfinished[action.command_id] = num
        if not num:
            self._reply_after(0.0, action.process, _generated(action))
        self._watch(action.process)

    def _watch(self, process: str) -> None:
        """Have the end of an engine's next sequence noticed."""
        engine = self.engines[process]
        if not engine.is_paused:
            engine.fill()
        engine.num_turns += 1
        seconds = engine.next_s()
        if seconds < _NEVER and process not in self._absent:
            self._after(seconds, partial(self._end_sequences, process, engine, engine.num_turns))

    def _end_sequences(self, process: str, engine: VirtualEngine, turn: int) -> None:
        if engine.num_turns != turn or self.engines.get(process) is not engine:
            return
        engine.advance(self.now)
        ended = engine.take_ended()
        by_command: dict[int, list[_Sequence]] = {}
        for sequence in ended:
            by_command.setdefault(sequence.command.command_id, []).append(sequence)
        if not engine.is_paused:
            engine.fill()
        for command_id, sequences in by_command.items():
            command = sequences[0].command
            reply = messages.SamplesFinished(
                command_id=command_id,
                step=command.step,
                purpose=command.purpose,
                samples=tuple(self._score(engine, sequence) for sequence in sequences),
            )
            self._handle(events.ProcessReplied(now=self.now, process=process, reply=reply))
            self._unfinished[command_id] -= len(sequences)
            if not self._unfinished[command_id]:
                del self._unfinished[command_id]
                self._handle(events.ProcessReplied(now=self.now, process=process, reply=_generated(command)))
        self._watch(process)

    def _score(self, engine: VirtualEngine, sequence: _Sequence) -> messages.SampleScored:
        counts = engine.count_by_version(sequence)
        for number, count in enumerate(counts):
            age = sequence.command.step - 1 - sequence.version - number
            self.tokens_by_age[age] = self.tokens_by_age.get(age, 0) + count
        newest = sequence.version + len(counts) - 1
        return messages.SampleScored(
            group=sequence.group,
            sample=sequence.place,
            prompt_length=sequence.prompt,
            response_length=sequence.length,
            num_tokens=sequence.prompt + sequence.length,
            oldest_version=sequence.version,
            newest_version=newest,
            tokens_by_version=tuple(counts),
            num_turns=1,
            finish_reason="stop",
            reward=float(sequence.place % 2),
            correct=False,
            response="",
        )

    def _pause(self, process: str, version: int, command_id: int) -> None:
        """Have an engine take a version, while its sequences wait."""
        engine = self.engines[process]
        engine.advance(self.now)
        engine.is_paused = True
        engine.num_turns += 1
        self._after(self.rates.refit_s, partial(self._resume, process, engine, version, command_id))

    def _resume(self, process: str, engine: VirtualEngine, version: int, command_id: int) -> None:
        if self.engines.get(process) is not engine or process in self._absent:
            return
        engine.advance(self.now)
        engine.is_paused = False
        engine.take_version(version)
        reply = messages.Refitted(command_id=command_id, version=version, num_bytes={}, seconds=0.0, memory=_MEMORY)
        self._handle(events.ProcessReplied(now=self.now, process=process, reply=reply))
        self._watch(process)

    # --- losses ------------------------------------------------------------------------------------------------------

    def _next_loss_s(self) -> float:
        return self._random.expovariate(self.rates.losses_per_hour / 3600)

    def _lose_engine(self) -> None:
        """Lose an engine: it makes nothing from now on, which is noticed later."""
        self._after(self._next_loss_s(), self._lose_engine)
        present = [name for name in self.engines if name not in self._absent]
        if not present or self.scheduler.tables.stage is not None:
            return
        process = self._random.choice(present)
        engine = self.engines[process]
        engine.advance(self.now)
        engine.stop()
        engine.num_turns += 1
        self._absent.add(process)
        self.num_losses += 1
        self._after(
            self.rates.notice_s,
            lambda: self._handle(events.ProcessLost(now=self.now, process=process, reason="simulated")),
        )


# --- replies ---------------------------------------------------------------------------------------------------------


def _answer(process: str, command: events.PlainCommand) -> messages.Reply:
    """Return the reply of a process that does what it was sent."""
    command_id = command.command_id
    match command:
        case messages.OpenRendezvous():
            return messages.RendezvousOpened(command_id=command_id, host="virtual", port=1)
        case messages.BuildTrainer():
            return messages.TrainerBuilt(
                command_id=command_id, version=0, num_parameters=1, shares_prompts=True, layout=process.encode()
            )
        case messages.BuildEngine():
            listener = messages.Listener(address="tcp://virtual:1", public_key=_KEY)
            return messages.EngineBuilt(command_id=command_id, layouts=(process.encode(),), samples_at=listener)
        case messages.PlanTransfers(sources=sources, destinations=destinations):
            return messages.TransfersPlanned(
                command_id=command_id,
                programs=dict.fromkeys([*sources, *destinations], b"program"),
                senders=(),
                transfer_groups=(),
                num_bytes={},
                predicted_s=0.0,
                bound_s=0.0,
                seconds=0.0,
            )
        case messages.InstallProgram():
            return messages.ProgramInstalled(command_id=command_id, num_copies=1, num_bytes=1)
        case messages.ConnectTransferGroup(transfer_group=transfer_group):
            return messages.TransferGroupConnected(command_id=command_id, transfer_group=transfer_group)
        case messages.Refit(version=version):
            return messages.Refitted(command_id=command_id, version=version, num_bytes={}, seconds=0.0, memory=_MEMORY)
        case messages.ReportDigests(version=version):
            return messages.DigestsReported(command_id=command_id, version=version, digests=(b"digest",), seconds=0.0)
        case messages.CommitVersion(version=version):
            return messages.VersionCommitted(command_id=command_id, version=version, differing={}, digest=1)
        case messages.CopyWeights(version=version, with_digests=with_digests):
            return messages.WeightsCopied(command_id=command_id, version=version, digests=(b"digest",) * with_digests)
        case messages.SaveCheckpoint():
            return messages.CheckpointCopied(command_id=command_id, why_waited="")
        case messages.AwaitCheckpoint():
            return messages.CheckpointSaved(command_id=command_id, num_bytes=1)
        case messages.RestoreSamples():
            raise AssertionError("a simulated run restores nothing")


def _trained(command_id: int, step: int) -> messages.Trained:
    return messages.Trained(
        command_id=command_id,
        step=step,
        version=step,
        metrics={},
        seconds={},
        compute_s=0.0,
        waited_s=0.0,
        has_update=True,
        memory=_MEMORY,
    )


def _generated(command: events.DispatchPrompts) -> messages.Generated:
    return messages.Generated(
        command_id=command.command_id,
        step=command.step,
        purpose=command.purpose,
        num_samples=1,
        num_tokens=1,
        seconds={},
        memory=_MEMORY,
    )
