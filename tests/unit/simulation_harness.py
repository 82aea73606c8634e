"""A simulated cluster that takes its time: the real scheduler, over engines and trainers of given rates."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
from cluster_harness import GRPO, Cluster, SentBatch, answer, made_with, result

from tandem.common.messages import Refit, ReportDigests, SamplesFinished
from tandem.coordinator.scheduler.events import (
    Action,
    CommitStep,
    DispatchCommand,
    DispatchPrompts,
    ProcessReplied,
)
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import CommandDeadlines, EngineBalance, RunSpec

NUM_FIRST = 16
"""Steps before what is measured: nothing of them was drawn when it will be drawn later."""
_FOREVER_S = 1e9
_NEVER_LATE = CommandDeadlines(
    **dict.fromkeys(("join", "build", "generate", "train", "evaluate", "refit", "save", "leave"), _FOREVER_S)
)


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated: sizes, and seconds."""

    num_engines: int = 2
    num_places: int = 16
    """Samples that each engine runs at once, each at one token a second."""
    num_groups: int = 8
    num_samples: int = 4
    mean_length: float = 20.0
    longest: float = 20.0
    """Lengths are `mean_length`, or lie evenly around it if that is less than `longest`, which one sample has."""
    training_s: float
    refit_s: float = 0.0
    verify_s: float = 0.0
    age: int = 0
    in_flight: bool = False
    num_steps: int = 56

    @property
    def spec(self) -> RunSpec:
        """What the scheduler is told."""
        return msgspec.structs.replace(
            GRPO,
            expected={"trainer": 1, "rollout": self.num_engines, "refit": 1},
            last_step=self.num_steps,
            num_groups=self.num_groups,
            validate_every=0,
            validate_at_start=False,
            save_every=0,
            max_trajectory_age_steps=self.age,
            updates_in_flight=self.in_flight,
            balance=EngineBalance(width=self.num_places, timeout_s=None),
            deadlines=_NEVER_LATE,
        )


class _Sample:
    """One that an engine is to make, or makes."""

    def __init__(self, command: DispatchPrompts, group: int, place: int, left_s: float) -> None:
        self.command, self.group, self.place = command, group, place
        self.left_s = left_s
        self.begun_with = 0


class _Engine:
    """Runs so many samples at once, at one token a second each; those that come first, first."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.running: list[_Sample] = []
        self.waiting: list[_Sample] = []
        self.unfinished: Counter[int] = Counter()
        """Samples by command."""
        self.is_paused = False
        self.version = 0

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if not self.is_paused:
            for sample in self.running:
                sample.left_s -= seconds

    def fill(self) -> None:
        """Begin what has waited, where there is room."""
        while self.waiting and len(self.running) < self.num_places:
            self.running.append(self.waiting.pop(0))
            self.running[-1].begun_with = self.version

    def next_s(self) -> float:
        """Return when a sample will be finished."""
        if self.is_paused or not self.running:
            return _FOREVER_S
        return max(0.0, min(sample.left_s for sample in self.running))


class Simulation(Cluster):
    """Runs the scheduler's commands in simulated time; notes when steps are done, and how old tokens are."""

    def __init__(self, simulated: Simulated, seed: int = 0) -> None:
        self.simulated = simulated
        self.num_samples = simulated.num_samples
        self.random = random.Random(seed)
        self.engines = {f"rollout-{i}": _Engine(simulated.num_places) for i in range(simulated.num_engines)}
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.committed_at: list[float] = []
        self.tokens_by_age: Counter[int] = Counter()
        self.longest: dict[int, tuple[int, int]] = {}
        """Of each step: the sample that is the longest."""
        super().__init__(simulated.spec)

    # --- events ------------------------------------------------------------------------------------------------------

    def give(self, event: object) -> list[Action]:
        """Have the scheduler decide; begin what it commands."""
        actions = super().give(event)
        pending, self.pending = self.pending, []
        for action in pending:
            self._begin(action)
        for action in actions:
            if isinstance(action, CommitStep):
                self.committed_at.append(self.now)
        return actions

    def _begin(self, action: DispatchCommand | DispatchPrompts | SentBatch) -> None:
        simulated = self.simulated
        if isinstance(action, DispatchPrompts):
            self._generate(action)
            return
        seconds = 0.0
        if isinstance(action, SentBatch):
            seconds = simulated.training_s
        elif isinstance(action.command, Refit):
            seconds = simulated.refit_s
            if action.process in self.engines:
                self.engines[action.process].is_paused = True
        elif isinstance(action.command, ReportDigests):
            seconds = simulated.verify_s
        self._after(seconds, partial(self._end, action))

    def _end(self, action: DispatchCommand | SentBatch) -> None:
        if isinstance(action, DispatchCommand) and isinstance(action.command, Refit) and action.process in self.engines:
            engine = self.engines[action.process]
            engine.is_paused, engine.version = False, action.command.version
        self.give(ProcessReplied(now=self.now, process=action.process, reply=answer(action)))

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.now + seconds, next(self.counter), do))

    # --- engines -----------------------------------------------------------------------------------------------------

    def _length(self, step: int, group: int, place: int) -> float:
        """Return the tokens of a sample: one of a step's is as long as may be, the others lie around the mean."""
        mean, longest = self.simulated.mean_length, self.simulated.longest
        if longest <= mean:
            return mean
        num = self.simulated.num_groups * self.simulated.num_samples
        if self.longest.setdefault(step, (self.random.randrange(self.simulated.num_groups), 0)) == (group, place):
            return longest
        # Lengths L u^q with u even in (0, 1) have a mean of L / (q + 1).
        power = (num - 1) * longest / (num * mean - longest) - 1
        return longest * random.Random(f"{step} {group} {place}").random() ** power

    def _generate(self, command: DispatchPrompts) -> None:
        engine = self.engines[command.process]
        for group in command.groups:
            for place in range(self.num_samples):
                engine.waiting.append(_Sample(command, group, place, self._length(command.step, group, place)))
                engine.unfinished[command.command_id] += 1

    def _finish(self, name: str, done: Iterable[_Sample]) -> None:
        """Send what is finished; of a command whose last that was, the end."""
        engine = self.engines[name]
        for sample in done:
            engine.running.remove(sample)
            command = sample.command
            reply = SamplesFinished(
                command_id=command.command_id,
                step=command.step,
                purpose=command.purpose,
                samples=(made_with(result(sample.group, sample.place), sample.begun_with, engine.version),),
            )
            self.give(ProcessReplied(now=self.now, process=name, reply=reply))
            engine.unfinished[command.command_id] -= 1
            if not engine.unfinished[command.command_id]:
                self.give(ProcessReplied(now=self.now, process=name, reply=answer(command)))

    # --- time --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end."""
        self.join_all()
        while self.tables.phase is not RunPhase.FINISHED:
            for engine in self.engines.values():
                if not engine.is_paused:
                    engine.fill()
            due_s = self.due[0][0] - self.now if self.due else _FOREVER_S
            seconds = min(due_s, *(engine.next_s() for engine in self.engines.values()))
            assert seconds < _FOREVER_S, f"the run stands still in step {self.tables.step}, {self.tables.phase.value}"
            self.now += seconds
            for engine in self.engines.values():
                self._note_ages(engine, seconds)
                engine.advance(seconds)
            if due_s <= seconds:
                heapq.heappop(self.due)[2]()
                continue
            for name, engine in self.engines.items():
                self._finish(name, [sample for sample in engine.running if sample.left_s <= 1e-9])

    def _note_ages(self, engine: _Engine, seconds: float) -> None:
        if not engine.is_paused:
            for sample in engine.running:
                if sample.command.step > NUM_FIRST:
                    self.tokens_by_age[sample.command.step - 1 - engine.version] += seconds

    def period_s(self) -> float:
        """Return the mean seconds of a step, after the first ones."""
        return (self.committed_at[-1] - self.committed_at[NUM_FIRST]) / (len(self.committed_at) - 1 - NUM_FIRST)

    def idle(self) -> tuple[float, float]:
        """Return the shares of what engines, and trainers, could have done after the first steps and did not."""
        steps = len(self.committed_at) - 1 - NUM_FIRST
        simulated, seconds = self.simulated, self.period_s() * steps
        busy_s = sum(self.tokens_by_age.values())
        places = simulated.num_engines * simulated.num_places
        return 1 - busy_s / places / seconds, 1 - simulated.training_s * steps / seconds

    def share_by_age(self) -> list[float]:
        """Return the shares of tokens by the age of the weights that made them."""
        total = sum(self.tokens_by_age.values())
        return [self.tokens_by_age[age] / total for age in range(self.simulated.age + 1)]
