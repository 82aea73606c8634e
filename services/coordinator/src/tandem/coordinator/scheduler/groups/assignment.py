"""Assignment: which engine generates which rollout groups.

`PinnedAssignment` is the plain way: a group belongs to one engine from the beginning, and waits for it, whatever
becomes of that engine, so that the same run computes the same things together. `BalancedAssignment` stands beside it
for ``async_engine``: an engine gets the next group when it has room and the fewest outstanding tokens, and what it
holds too long, or loses, moves on.

Either way all samples of a group that count come from one engine: a group that moves is generated again as a whole.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from typing import Protocol

from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.coordinator.scheduler.groups.table import Group
from tandem.coordinator.scheduler.spec import Balance

CanGenerate = Callable[[str, Group], bool]
"""Whether an engine may generate a group, which it then is given: it holds young weights, and can keep the samples."""
Assigned = dict[str, list[Group]]
"""What each engine is to generate now."""


class Assignment(Protocol):
    """Decides which engine generates what. It is told all that changes, and asks whether an engine can."""

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits."""
        ...

    def add(self, groups: Sequence[Group], engines: Sequence[str]) -> None:
        """Take groups that have just begun to wait."""
        ...

    def put_back(self, groups: Sequence[Group]) -> None:
        """Take groups that wait again; they still say which engine they had."""
        ...

    def choose(self, can_generate: CanGenerate, now: float) -> Assigned:
        """Assign as many of the waiting groups as can be generated now; those wait no longer."""
        ...

    def finished(self, engine: str, group: Group, num_samples: int) -> None:
        """Take note that an engine has finished so many samples of a group."""
        ...

    def withdraw(self, engine: str) -> None:
        """Take note that an engine has nothing to generate any more, and is as good as new when it can generate."""
        ...

    def move(self, engine: str, others: Sequence[str]) -> bool:
        """Have what waits for an engine that leaves wait for others; return whether anything did."""
        ...

    def forget(self, engine: str) -> None:
        """Take note that an engine has left, and has nothing in flight."""
        ...

    def overstayed(self, now: float) -> list[str]:
        """Return the engines whose groups are to move on, each once; call `withdraw_slow` for each."""
        ...

    def clear(self) -> None:
        """Forget every group."""
        ...


class PinnedAssignment:
    """Every group has its engine: of groups that come together, one each in turn."""

    def __init__(self, changed: Changed = no_agenda) -> None:
        self._changed = changed
        self._waiting: Assigned = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits for its engine."""
        return bool(self._waiting)

    def add(self, groups: Sequence[Group], engines: Sequence[str]) -> None:
        """Pin each group to an engine."""
        for i, group in enumerate(groups):
            group.engine = engines[i % len(engines)]
        self.put_back(groups)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Have groups wait for their engine."""
        for group in groups:
            assert group.engine is not None, "every group has been pinned"
            _queue(self._waiting.setdefault(group.engine, []), group)
        self._changed()

    def choose(self, can_generate: CanGenerate, now: float) -> Assigned:
        """Give every engine what waits for it, as far as it can generate that."""
        assigned: Assigned = {}
        for engine, groups in [*self._waiting.items()]:
            able = [*itertools.takewhile(functools.partial(can_generate, engine), groups)]
            if able:
                assigned[engine] = able
                self._waiting[engine] = groups[len(able) :]
                if not self._waiting[engine]:
                    del self._waiting[engine]
        return assigned

    def finished(self, engine: str, group: Group, num_samples: int) -> None:
        """Nothing follows from a part of what an engine was given."""

    def withdraw(self, engine: str) -> None:
        """Nothing is known of an engine but what waits for it."""

    def move(self, engine: str, others: Sequence[str]) -> bool:
        """Pin what waits for an engine to others, one each in turn."""
        groups = self._waiting.pop(engine, [])
        if groups:
            self._changed()
            self.add(groups, others)
        return bool(groups)

    def forget(self, engine: str) -> None:
        """Nothing is known of an engine but what waits for it."""

    def overstayed(self, now: float) -> list[str]:
        """Return none: no engine is ever too slow."""
        return []

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._changed()


class _Load:
    """What one engine has to do."""

    def __init__(self, place: int) -> None:
        self.place = place
        """Among the engines: the first of those that have the same to do gets the next group."""
        self.num_samples = 0
        """That are in flight."""
        self.num_tokens = 0
        """Outstanding: what these samples may take, at most."""
        self.busy_since = 0.0
        """When it last was given something and had nothing."""
        self.is_open = True
        """Whether it gets more: not after it was too slow, until new groups come, or a faster one leaves."""

    def clear(self) -> None:
        """Forget what there was to do."""
        self.num_samples = self.num_tokens = 0


class BalancedAssignment:
    """Keeps the outstanding tokens of engines alike, as far as they have room."""

    def __init__(self, *, width: int, timeout_s: float | None, changed: Changed = no_agenda) -> None:
        """`width`: samples that an engine runs at once. `timeout_s`: how long an idle engine waits for others."""
        self._changed = changed
        self._width = width
        self._timeout_s = timeout_s
        self._waiting: deque[Group] = deque()
        self._loads: dict[str, _Load] = {}
        self._leaving: set[str] = set()
        """Engines that get nothing more."""
        self._num_loads = 0
        """Engines that there ever were."""
        self._least: list[tuple[int, int, str]] = []
        """A heap of outstanding tokens, place and name; an entry that is not as the engine is now is stale."""
        self._idle_since: float | None = None
        """Since when an engine has had nothing to do while others have."""

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits."""
        return bool(self._waiting)

    def add(self, groups: Sequence[Group], engines: Sequence[str]) -> None:
        """Have groups wait for any engine with room; every engine gets a new chance."""
        self.put_back(groups)
        self._idle_since = None
        self._reopen(engines)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Have groups wait for any engine with room, after those of their step that wait already."""
        for group in groups:
            _queue(self._waiting, group)
        self._changed()

    def choose(self, can_generate: CanGenerate, now: float) -> Assigned:
        """Give the next group to the engine with room that has the fewest outstanding tokens, until none has room."""
        assigned: Assigned = {}
        unable: list[str] = []
        while self._waiting and self._least:
            num_tokens, place, engine = self._least[0]
            load = self._loads.get(engine)
            if load is None or (num_tokens, place) != (load.num_tokens, load.place) or not self._has_room(load):
                heapq.heappop(self._least)
                continue
            group = self._waiting[0]
            if not can_generate(engine, group):
                unable.append(engine)
                heapq.heappop(self._least)
                continue
            self._waiting.popleft()
            assigned.setdefault(engine, []).append(group)
            load.busy_since = load.busy_since if load.num_samples else now
            load.num_samples += group.size.num_samples
            load.num_tokens += group.size.num_samples * group.size.num_tokens
            self._update(engine)
        for engine in unable:
            self._update(engine)
        return assigned

    def finished(self, engine: str, group: Group, num_samples: int) -> None:
        """Make room for further groups in the place of samples that are done."""
        load = self._load(engine)
        load.num_samples -= num_samples
        load.num_tokens -= num_samples * group.size.num_tokens
        if self._has_room(load):
            self._update(engine)
            self._changed()

    def withdraw(self, engine: str) -> None:
        """Forget what an engine has to do."""
        self._leaving.discard(engine)
        load = self._load(engine)
        load.clear()
        load.is_open = True
        self._update(engine)
        self._changed()

    def move(self, engine: str, others: Sequence[str]) -> bool:
        """Nothing waits for one engine; but it is not idle when it has nothing to do, and others get a new chance."""
        if engine not in self._leaving:
            self._leaving.add(engine)
            self._reopen(others)
        return False

    def forget(self, engine: str) -> None:
        """Give the engine nothing more; what it has in the heap is stale."""
        self._loads.pop(engine, None)
        self._leaving.discard(engine)

    def overstayed(self, now: float) -> list[str]:
        """Return engines that have held groups too long while another had nothing to do; they get no more."""
        busy = [engine for engine, load in self._loads.items() if load.num_samples]
        staying = [load for engine, load in self._loads.items() if engine not in self._leaving]
        is_idle = any(load.is_open and not load.num_samples for load in staying)
        if self._timeout_s is None or not busy or not is_idle:
            self._idle_since = None
            return []
        since = self._idle_since = now if self._idle_since is None else self._idle_since
        late = [engine for engine in busy if now - max(since, self._loads[engine].busy_since) > self._timeout_s]
        for engine in late:
            self._loads[engine].clear()
            self._loads[engine].is_open = False
        return late

    def clear(self) -> None:
        """Forget what waits, and what engines have to do."""
        self._waiting.clear()
        self._changed()
        for engine, load in self._loads.items():
            load.clear()
            self._update(engine)

    def _reopen(self, engines: Sequence[str]) -> None:
        """Give engines more, also those that were too slow."""
        for engine in engines:
            self._load(engine).is_open = True
            self._update(engine)
        self._changed()

    def _load(self, engine: str) -> _Load:
        if engine not in self._loads:
            self._loads[engine] = _Load(place=self._num_loads)
            self._num_loads += 1
        return self._loads[engine]

    def _has_room(self, load: _Load) -> bool:
        return load.is_open and load.num_samples < self._width

    def _update(self, engine: str) -> None:
        """Enter an engine as it is now."""
        load = self._loads[engine]
        if self._has_room(load):
            heapq.heappush(self._least, (load.num_tokens, load.place, engine))


def assignment_for(balance: Balance | None, changed: Changed = no_agenda) -> Assignment:
    """Return how groups are assigned to engines: balanced if it says how, else pinned."""
    if balance is None:
        return PinnedAssignment(changed)
    return BalancedAssignment(width=balance.width, timeout_s=balance.timeout_s, changed=changed)


def _queue(waiting: MutableSequence[Group], group: Group) -> None:
    """Insert a group behind those that are needed no later than it is."""
    at = len(waiting)
    while at and _turn(waiting[at - 1]) > _turn(group):
        at -= 1
    waiting.insert(at, group)


def _turn(group: Group) -> tuple[bool, int]:
    """Return what groups are sorted by: a step waits for its validation, of which nothing is stored, and then for the
    step before it."""
    return group.purpose != "validate", group.step
