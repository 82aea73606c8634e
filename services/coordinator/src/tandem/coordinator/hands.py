"""Hands: which engine generates for which prompt groups. Pure, like the plan.

`DealtHands` is the plain way: each engine gets its groups at once, and makes them whatever becomes of it, so that the
same run computes the same things together. `BalancedHands` stands beside it for ``async_engine``: an engine gets the
next group when it has room and the fewest tokens still to make, and what it holds too long, or loses, moves on.

Either way all samples of a group that count come from one engine: a group that moves is generated again as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tandem.common.messages import Purpose, SamplesFinished
from tandem.coordinator.decisions import Action, DiscardSamples, DispatchPrompts, Phase
from tandem.coordinator.orders import Orders


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the samples are for, and how long each order for some of them may take."""

    step: int
    purpose: Purpose
    phase: Phase
    allowed_s: float
    groups: range


class GroupSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt group asks of an engine."""

    num_samples: int
    num_tokens: int
    """Of each sample, at most: the prompt and the longest response."""


Sizes = Callable[[Task], Sequence[GroupSize]]
"""The sizes of a task's groups, in order."""


class Hands(Protocol):
    """Deals a task's groups to engines."""

    def deal(self, task: Task, engines: Sequence[str]) -> list[Action]:
        """Begin a task; every engine holds the version that it is for."""
        ...

    def take_samples(self, engine: str, finished: SamplesFinished) -> list[Action]:
        """Take note of samples that an engine has made of what it was asked for."""
        ...

    def withdraw(self, engine: str) -> list[Action]:
        """Discard what an engine has made: it is lost, or did not hold the version."""
        ...

    def restore(self, engine: str) -> list[Action]:
        """Use an engine again that was withdrawn: it holds the version now."""
        ...

    def tick(self) -> list[Action]:
        """Take note of the time."""
        ...

    def clear(self) -> None:
        """The task is over, or abandoned."""
        ...


class DealtHands:
    """Deals groups like cards: the same run deals the same hands."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._task: Task | None = None
        self._hands: dict[str, tuple[int, ...]] = {}

    def deal(self, task: Task, engines: Sequence[str]) -> list[Action]:
        """Give every engine its groups, one after the other."""
        self._task = task
        hands = {engine: tuple(task.groups[i :: len(engines)]) for i, engine in enumerate(engines)}
        self._hands = {engine: groups for engine, groups in hands.items() if groups}
        return [self._prompts(task, engine) for engine in self._hands]

    def take_samples(self, engine: str, finished: SamplesFinished) -> list[Action]:
        """Nothing follows from a part of a hand."""
        return []

    def withdraw(self, engine: str) -> list[Action]:
        """Discard an engine's samples; its hand waits for it."""
        if self._task is None or engine not in self._hands:
            return []
        self._orders.drop(engine, self._task.phase)
        return [DiscardSamples(step=self._task.step, purpose=self._task.purpose, groups=self._hands[engine])]

    def restore(self, engine: str) -> list[Action]:
        """Ask an engine for its hand again."""
        return [self._prompts(self._task, engine)] if self._task is not None and engine in self._hands else []

    def tick(self) -> list[Action]:
        """Nothing happens by itself."""
        return []

    def clear(self) -> None:
        """Forget the hands."""
        self._task, self._hands = None, {}

    def _prompts(self, task: Task, engine: str) -> Action:
        promise = self._orders.promise(engine, task.phase, task.allowed_s)
        return DispatchPrompts(
            member=engine,
            step=task.step,
            purpose=task.purpose,
            groups=self._hands[engine],
            oldest=promise["command_id"],
            **promise,
        )


class _Hand:
    """What one engine has been given of the task."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        """All of them, also those that are done."""
        self.unfinished: dict[int, set[int]] = {}
        """Samples still to come, by group."""
        self.num_tokens = 0
        """That these samples may take, at most."""
        self.dealt_at = 0.0
        """When it last was given something and had nothing."""
        self.oldest: int | None = None
        """The first order that counts."""
        self.is_open = True
        """Whether it gets more: not while its engine is withdrawn, and not after it was too slow."""

    @property
    def num_samples(self) -> int:
        """Samples still to come."""
        return sum(map(len, self.unfinished.values()))


class BalancedHands:
    """Keeps the tokens that engines still have to make alike, as far as they have room."""

    def __init__(self, orders: Orders, sizes: Sizes, *, width: int, timeout_s: float | None) -> None:
        """`width`: samples that an engine runs at once. `timeout_s`: how long an idle engine waits for others."""
        self._orders = orders
        self._size_of = sizes
        self._width = width
        self._timeout_s = timeout_s
        self._task: Task | None = None
        self._sizes: dict[int, GroupSize] = {}
        self._pool: deque[int] = deque()
        """Groups that no engine has."""
        self._hands: dict[str, _Hand] = {}
        self._idle_since: float | None = None
        """Since when an engine has had nothing to do while others have."""

    def deal(self, task: Task, engines: Sequence[str]) -> list[Action]:
        """Deal as many groups as engines have room for."""
        self._task = task
        self._sizes = dict(zip(task.groups, self._size_of(task), strict=True))
        self._pool = deque(task.groups)
        self._hands = {engine: _Hand() for engine in engines}
        self._idle_since = None
        return self._deal(task)

    def take_samples(self, engine: str, finished: SamplesFinished) -> list[Action]:
        """Deal further groups in the place of samples that are done."""
        if self._task is None:
            return []
        hand = self._hands[engine]
        for sample in finished.samples:
            awaited = hand.unfinished.get(sample.group, set())
            if sample.sample in awaited:  # not a repetition
                awaited.discard(sample.sample)
                hand.num_tokens -= self._sizes[sample.group].num_tokens
                if not awaited:
                    del hand.unfinished[sample.group]
        return self._deal(self._task)

    def withdraw(self, engine: str) -> list[Action]:
        """Discard all that an engine has made of the task; give its groups to others."""
        if self._task is None:
            return []
        self._orders.drop(engine, self._task.phase)
        groups = self._hands[engine].groups
        self._close(engine, [])
        return self._move(self._task, groups)

    def restore(self, engine: str) -> list[Action]:
        """Deal to an engine again."""
        if self._task is None:
            return []
        self._hands[engine].is_open = True
        return self._deal(self._task)

    def tick(self) -> list[Action]:
        """Have prompts move on that an engine holds too long while another has nothing to do."""
        busy = [engine for engine, hand in self._hands.items() if hand.unfinished]
        is_idle = any(hand.is_open and not hand.unfinished for hand in self._hands.values())
        if self._task is None or self._timeout_s is None or not busy or not is_idle:
            self._idle_since = None
            return []
        now = self._orders.now
        since = self._idle_since = now if self._idle_since is None else self._idle_since
        late = [e for e in busy if now - max(since, self._hands[e].dealt_at) > self._timeout_s]
        groups = [group for engine in late for group in self._hands[engine].unfinished]
        for engine in late:
            self._orders.drop(engine, self._task.phase)
            hand = self._hands[engine]
            self._close(engine, [group for group in hand.groups if group not in hand.unfinished])
        return [*(self._stop(self._task, engine) for engine in late), *self._move(self._task, groups)]

    def clear(self) -> None:
        """Forget the hands."""
        self._task, self._hands = None, {}
        self._pool.clear()

    def _close(self, engine: str, done: list[int]) -> None:
        """Leave an engine only the groups that are done, and deal no more to it."""
        self._hands[engine] = _Hand()
        self._hands[engine].groups = done
        self._hands[engine].is_open = False

    def _move(self, task: Task, groups: list[int]) -> list[Action]:
        """Discard what was made of groups and deal them to others."""
        if not groups:
            return []
        self._pool.extend(groups)
        return [DiscardSamples(step=task.step, purpose=task.purpose, groups=tuple(groups)), *self._deal(task)]

    def _deal(self, task: Task) -> list[Action]:
        """Give the next group to the engine with room that has the fewest tokens to make, until none has room."""
        dealt: dict[str, list[int]] = {}
        while self._pool:
            free = [name for name, hand in self._hands.items() if hand.is_open and hand.num_samples < self._width]
            if not free:
                break
            engine = min(free, key=lambda name: self._hands[name].num_tokens)
            group = self._pool.popleft()
            dealt.setdefault(engine, []).append(group)
            hand, size = self._hands[engine], self._sizes[group]
            hand.dealt_at = hand.dealt_at if hand.unfinished else self._orders.now
            hand.groups.append(group)
            hand.unfinished[group] = set(range(size.num_samples))
            hand.num_tokens += size.num_samples * size.num_tokens
        return [self._prompts(task, engine, tuple(groups)) for engine, groups in dealt.items()]

    def _prompts(self, task: Task, engine: str, groups: tuple[int, ...]) -> Action:
        promise = self._orders.promise(engine, task.phase, task.allowed_s)
        hand = self._hands[engine]
        hand.oldest = promise["command_id"] if hand.oldest is None else hand.oldest
        return DispatchPrompts(
            member=engine, step=task.step, purpose=task.purpose, groups=groups, oldest=hand.oldest, **promise
        )

    def _stop(self, task: Task, engine: str) -> Action:
        """Have an engine give up all it was asked for; nobody waits for its answer."""
        promise = self._orders.notice(task.allowed_s)
        return DispatchPrompts(
            member=engine, step=task.step, purpose=task.purpose, groups=(), oldest=promise["command_id"], **promise
        )
