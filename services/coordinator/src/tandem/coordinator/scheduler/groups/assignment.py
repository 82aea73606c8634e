"""Assignment: which engine generates which rollout groups.

`PinnedAssignment` is the plain way. A group belongs to one engine from the beginning and waits for it, whatever becomes
of that engine, so that the same run batches the same groups together.

`BalancedAssignment` is the way of ``async_engine``. The next group goes to the engine with room that has the fewest
outstanding tokens. Groups that an engine holds too long, or loses, move to another.

Either way, all samples of a group that count come from one engine: a group that moves is generated again as a whole.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from typing import Protocol

from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.coordinator.scheduler.groups.table import SampleGroup

CanGenerate = Callable[[str, SampleGroup], bool]
"""Whether an engine may generate a group: its weights are young enough, and it can keep the samples."""
Assigned = dict[str, list[SampleGroup]]
"""The groups that each engine is to generate now."""


class GroupAssignment(Protocol):
    """Decides which engine generates which group. It is told of all changes, and asks whether an engine can."""

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits."""
        ...

    def add(self, groups: Sequence[SampleGroup], engines: Sequence[str]) -> None:
        """Add groups that have just begun to wait."""
        ...

    def put_back(self, groups: Sequence[SampleGroup]) -> None:
        """Add groups that wait again. They still name the engine they had."""
        ...

    def choose(self, can_generate: CanGenerate, now: float) -> Assigned:
        """Assign as many waiting groups as can be generated now, and return them."""
        ...

    def withdraw(self, engine: str) -> None:
        """Note that an engine has nothing left to generate, and starts afresh when it can generate again."""
        ...

    def move(self, engine: str, targets: Sequence[str]) -> bool:
        """Reassign the groups that wait for a draining engine. Return whether there were any."""
        ...

    def forget(self, engine: str) -> None:
        """Note that an engine has left, and has nothing in flight."""
        ...

    def overstayed(self, now: float) -> list[str]:
        """Return the engines that have held groups too long while others were idle, each once. Their groups move on."""
        ...

    def clear(self) -> None:
        """Forget every group."""
        ...


class PinnedAssignment:
    """Pins every group to an engine; groups that come together go to the engines in turn."""

    def __init__(self, changed: Changed = no_agenda) -> None:
        self._changed = changed
        self._waiting: Assigned = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits for its engine."""
        return bool(self._waiting)

    def add(self, groups: Sequence[SampleGroup], engines: Sequence[str]) -> None:
        """Pin each group to an engine."""
        for i, group in enumerate(groups):
            group.engine = engines[i % len(engines)]
        self.put_back(groups)

    def put_back(self, groups: Sequence[SampleGroup]) -> None:
        """Let groups wait for their engine again."""
        for group in groups:
            assert group.engine is not None, "every group has been pinned"
            queue(self._waiting.setdefault(group.engine, []), group)
        self._changed()

    def choose(self, can_generate: CanGenerate, now: float) -> Assigned:
        """Give every engine the groups that wait for it, as far as it can generate them."""
        assigned: Assigned = {}
        for engine, groups in [*self._waiting.items()]:
            able = [*itertools.takewhile(functools.partial(can_generate, engine), groups)]
            if able:
                assigned[engine] = able
                self._waiting[engine] = groups[len(able) :]
                if not self._waiting[engine]:
                    del self._waiting[engine]
        return assigned

    def withdraw(self, engine: str) -> None:
        """Do nothing: only the waiting groups of an engine are known here."""

    def move(self, engine: str, targets: Sequence[str]) -> bool:
        """Pin the groups that wait for an engine to others, in turn."""
        groups = self._waiting.pop(engine, [])
        if groups:
            self._changed()
            self.add(groups, targets)
        return bool(groups)

    def forget(self, engine: str) -> None:
        """Do nothing: only the waiting groups of an engine are known here."""

    def overstayed(self, now: float) -> list[str]:
        """Return none: no engine is ever too slow."""
        return []

    def clear(self) -> None:
        """Forget the waiting groups."""
        self._waiting.clear()
        self._changed()


def queue(waiting: MutableSequence[SampleGroup], group: SampleGroup) -> None:
    """Insert a group behind those that are needed no later than it is."""
    at = len(waiting)
    while at and waiting[at - 1].turn > group.turn:
        at -= 1
    waiting.insert(at, group)


class _Load:
    """The work of one engine."""

    def __init__(self, place: int) -> None:
        self.place = place
        """The engine's place among the engines, which breaks ties: the first of equally loaded ones gets the next
        group.
        """
        self.num_samples = 0
        """Samples in flight."""
        self.num_tokens = 0
        """Outstanding tokens: the most that these samples may take."""
        self.busy_since = 0.0
        """The time when it last got work while it had none."""
        self.is_open = True
        """Whether it gets more. After it was too slow, it gets none until new groups come or a faster engine leaves."""

    def clear(self) -> None:
        """Forget the work."""
        self.num_samples = self.num_tokens = 0


class BalancedAssignment:
    """Keeps the outstanding tokens of engines alike, as far as they have room."""

    def __init__(self, *, width: int, timeout_s: float | None, changed: Changed = no_agenda) -> None:
        """Take the samples that an engine runs at once, and the seconds that an idle engine waits for others."""
        self._changed = changed
        self._width = width
        self._timeout_s = timeout_s
        self._waiting: deque[SampleGroup] = deque()
        self._loads: dict[str, _Load] = {}
        self._leaving: set[str] = set()
        """Draining engines, which get nothing more."""
        self._num_loads = 0
        """The number of engines that there ever were."""
        self._least: list[tuple[int, int, str]] = []
        """A heap of outstanding tokens, place and name. An entry other than the engine's present load is stale."""
        self._idle_since: float | None = None
        """The time since which an engine has been idle while others are busy."""

    @property
    def is_waiting(self) -> bool:
        """Whether any group waits."""
        return bool(self._waiting)

    def add(self, groups: Sequence[SampleGroup], engines: Sequence[str]) -> None:
        """Let groups wait for any engine with room. Every engine gets a new chance."""
        self.put_back(groups)
        self._idle_since = None
        self._reopen(engines)

    def put_back(self, groups: Sequence[SampleGroup]) -> None:
        """Let groups wait for any engine with room, after the groups of their step that already wait."""
        for group in groups:
            queue(self._waiting, group)
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

    def finished(self, engine: str, group: SampleGroup, num_samples: int) -> None:
        """Make room for further groups in the place of finished samples."""
        load = self._load(engine)
        load.num_samples -= num_samples
        load.num_tokens -= num_samples * group.size.num_tokens
        if self._has_room(load):
            self._update(engine)
            self._changed()

    def withdraw(self, engine: str) -> None:
        """Forget the work of an engine."""
        self._leaving.discard(engine)
        load = self._load(engine)
        load.clear()
        load.is_open = True
        self._update(engine)
        self._changed()

    def move(self, engine: str, targets: Sequence[str]) -> bool:
        """Return False: no group waits for one engine. Stop counting it as idle, and give others a new chance."""
        if engine not in self._leaving:
            self._leaving.add(engine)
            self._reopen(targets)
        return False

    def forget(self, engine: str) -> None:
        """Give the engine nothing more. Its entries in the heap are stale."""
        self._loads.pop(engine, None)
        self._leaving.discard(engine)

    def overstayed(self, now: float) -> list[str]:
        """Return the engines that have held groups too long while another was idle. They get no more."""
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
        """Forget the waiting groups and the work of engines."""
        self._waiting.clear()
        self._changed()
        for engine, load in self._loads.items():
            load.clear()
            self._update(engine)

    def _reopen(self, engines: Sequence[str]) -> None:
        """Let engines get more groups, including those that were too slow."""
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
        """Enter an engine's present load in the heap."""
        load = self._loads[engine]
        if self._has_room(load):
            heapq.heappush(self._least, (load.num_tokens, load.place, engine))
