"""Balanced assignment, of ``async_engine``: the next group goes to the engine with the least to do.

It goes to the engine with room that has the fewest outstanding tokens. Groups that an engine holds too long, or loses,
move to another.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.coordinator.scheduler.groups.assignment import Assigned, CanGenerate, queue
from tandem.coordinator.scheduler.groups.table import SampleGroup


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
