"""The table of rollout groups, each a prompt and its samples, how far each is, and restored ones.

A group moves through these states::

    WAITING ── assigned to an engine ──▶ IN_FLIGHT ── every sample is there ──▶ READY ── a step trains on it ──▶ TAKEN
       ▲                                     │                                   │
       └── its engine is lost, too slow, or did not hold the version it should ──┘
       └── trainers cannot fetch its samples ─────────────────────────────────────────────────────┘

A group's identity is its place in the data order: the step that trains on it, and its number there. So a group that is
generated again is the same group. Only this module tells a repeated result from a new one.

A restored group is trained on without generating it again, as long as the run has the weights that made it. It has them
while every step since the checkpoint trains on the same groups as before. Once a group of a step is generated again,
the step's weights may differ. Then groups that were made with these or later weights are dropped.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tandem.common.messages import Purpose, SampleScored, SamplesFinished
from tandem.coordinator.scheduler.agenda import Changed, no_agenda
from tandem.coordinator.scheduler.events import GroupSize, Place, RestoredGroup, SampleRecord


class GroupState(enum.Enum):
    """The states of a group."""

    WAITING = "waiting for an engine"
    IN_FLIGHT = "being generated"
    READY = "every sample is there"
    TAKEN = "trained on, or counted"


NO_VERSION = sys.maxsize
"""The oldest version of no samples."""


class SampleGroup:
    """One prompt and its samples."""

    __slots__ = (
        "engine",
        "newest_version",
        "number",
        "oldest_version",
        "purpose",
        "request",
        "results",
        "size",
        "state",
        "step",
        "turn",
        "unfinished",
    )

    def __init__(self, step: int, purpose: Purpose, number: int, size: GroupSize) -> None:
        self.step = step
        self.purpose = purpose
        self.number = number
        """The group's number within its step."""
        self.turn = purpose != "validate", step
        """Its place among waiting groups: a step waits for its validation, which stores nothing, and then for the step
        before it.
        """
        self.size = size
        self.state = GroupState.WAITING
        self.engine: str | None = None
        """The engine that generates it, or did. While it waits, the only engine that may, if there is one."""
        self.request = 0
        """The id of the `Generate` or `RestoreSamples` with the samples that count."""
        self.unfinished: set[int] = set()
        """The numbers of the samples in flight."""
        self.results: dict[int, SampleScored] = {}
        """The results, by the sample's place in the group."""
        self.oldest_version = NO_VERSION
        """The oldest weights that any of these were made with."""
        self.newest_version = -1
        """The newest weights that any of these were made with."""


class StepGroups:
    """The groups of one step, or of its validation, in the data order."""

    def __init__(self) -> None:
        self.groups: list[SampleGroup] = []
        self.num_batches = 0
        """The number of times that prompts were drawn."""
        self.num_drawn = 0
        """The groups requested from the data, including those still to come."""
        self.num_ready = 0
        self.num_requests = 0
        """The `Generate` and `RestoreSamples` commands without an answer."""
        self.newest_versions: dict[str, int] = {}
        """The newest weights with which each engine has made any of the ready groups."""

    @property
    def is_ready(self) -> bool:
        """Whether every sample of every group is there, and every command to generate them is answered."""
        return self.num_ready == len(self.groups) == self.num_drawn and not self.num_requests

    def records(self) -> list[SampleRecord]:
        """Return the records of all finished samples, in the order of groups and samples."""
        return [
            SampleRecord(group.results[sample], str(group.engine), group.request)
            for group in self.groups
            for sample in sorted(group.results)
        ]


class GroupTable:
    """All groups of steps that are not done, on their way from being drawn to being trained on."""

    def __init__(
        self,
        changed: Changed = no_agenda,
        changed_ready: Changed = no_agenda,
        changed_stored: Changed = no_agenda,
    ) -> None:
        self._changed = changed
        """To be called when a group changes its state, not when it gets one more sample."""
        self._changed_ready = changed_ready
        """To be called when all groups of a step are ready. No rule needs to know when they no longer are."""
        self._changed_stored = changed_stored
        self._steps: dict[tuple[int, Purpose], StepGroups] = {}
        self._of_request: dict[int, StepGroups] = {}
        """The step's groups by the id of a `Generate` or `RestoreSamples` without an answer."""
        self._of_engine: dict[str, dict[SampleGroup, None]] = {}
        """Each engine's groups in flight or ready, in the order of their assignment."""
        self._stored: dict[str, dict[int, int]] = {}
        """Tokens that each rollout keeps of each training step. Samples that no longer count are released with the
        step.
        """
        self._awaited: dict[str, int] = {}
        """Tokens that each rollout may have to keep of the groups that it is generating."""
        self._num_in_flight: dict[Purpose, dict[str, int]] = {"train": {}, "validate": {}}
        """The number of groups that each engine is generating, without engines that generate none."""

    def __iter__(self) -> Iterator[SampleGroup]:
        for step in self._steps.values():
            yield from step.groups

    def of_step(self, step: int, purpose: Purpose) -> StepGroups | None:
        """Return the groups of a step; None if it has not begun or is done."""
        return self._steps.get((step, purpose))

    def of_engine(self, engine: str, *states: GroupState) -> list[SampleGroup]:
        """Return the groups of an engine in these states, in the order in which they were assigned."""
        return [group for group in self._of_engine.get(engine, {}) if group.state in states]

    def num_in_flight(self, engine: str, *purposes: Purpose) -> int:
        """Return how many groups an engine is generating, of some purposes or of any."""
        num = 0
        for purpose in purposes or self._num_in_flight:
            num += self._num_in_flight[purpose].get(engine, 0)
        return num

    @property
    def num_generating(self) -> int:
        """Engines that are generating."""
        train, validate = self._num_in_flight["train"], self._num_in_flight["validate"]
        return len(train) + (len(validate.keys() - train.keys()) if validate else 0)

    def num_ready_after(self, step: int) -> int:
        """Return how many groups are ready that later steps train on."""
        return sum(
            of.num_ready for (of_step, purpose), of in self._steps.items() if of_step > step and purpose == "train"
        )

    def num_tokens(self, engine: str) -> int:
        """Return the tokens that a rollout keeps, or may have to keep, until their steps are done."""
        return sum(self._stored.get(engine, {}).values()) + self._awaited.get(engine, 0)

    # --- drawn and assigned ------------------------------------------------------------------------------------------

    def draw(self, step: int, purpose: Purpose, count: int) -> range:
        """Make room for `count` more groups of a step; return their numbers."""
        of_step = self._steps.setdefault((step, purpose), StepGroups())
        first = of_step.num_drawn
        of_step.num_batches += 1
        of_step.num_drawn += count
        return range(first, first + count)

    def add(self, step: int, purpose: Purpose, sizes: Sequence[GroupSize]) -> list[SampleGroup]:
        """Add the groups that were drawn, which wait from now on; none if the step is no longer wanted."""
        of_step = self._steps.get((step, purpose))
        if of_step is None:
            return []
        first = len(of_step.groups)
        for number, size in enumerate(sizes, first):
            of_step.groups.append(SampleGroup(step, purpose, number, size))
        if of_step.is_ready:  # no group was drawn
            self._changed_ready()
        return of_step.groups[first:]

    def assign(self, groups: Iterable[SampleGroup], engine: str, request: int) -> None:
        """Note that an engine was asked for groups that have waited, all of one step."""
        for group in groups:
            if request not in self._of_request:
                self._of_request[request] = self._steps[group.step, group.purpose]
                self._of_request[request].num_requests += 1
            group.state, group.engine, group.request = GroupState.IN_FLIGHT, engine, request
            group.unfinished = set(range(group.size.num_samples))
            self._await_tokens(group, group.size.num_samples)
            self._count_in_flight(group, 1)
            self._of_engine.setdefault(engine, {})[group] = None
        self._changed()
        self._changed_stored()

    def close_request(self, request: int) -> None:
        """Note that a `Generate` is answered or given up. Do nothing for another request."""
        of_step = self._of_request.pop(request, None)
        if of_step is not None:
            of_step.num_requests -= 1
            if of_step.is_ready:
                self._changed_ready()

    # --- generated ---------------------------------------------------------------------------------------------------

    def take_results(self, engine: str, finished: SamplesFinished) -> list[tuple[SampleGroup, int]]:
        """Keep results; return how many of each group were new. Repeated results, and those of groups given up, do not
        count.
        """
        of_step = self._steps.get((finished.step, finished.purpose))
        if of_step is None:
            return []
        news: dict[SampleGroup, int] = {}
        for sample in finished.samples:
            group = of_step.groups[sample.group] if sample.group < len(of_step.groups) else None
            is_asked = group is not None and group.engine == engine and group.request == finished.command_id
            if group is None or not is_asked or sample.sample not in group.unfinished:
                continue
            group.unfinished.discard(sample.sample)
            group.results[sample.sample] = sample
            if sample.oldest_version < group.oldest_version:
                group.oldest_version = sample.oldest_version
            if sample.newest_version > group.newest_version:
                group.newest_version = sample.newest_version
            self._await_tokens(group, -1)
            if group.purpose == "train":
                of_engine = self._stored.setdefault(engine, {})
                of_engine[group.step] = of_engine.get(group.step, 0) + sample.num_tokens
            news[group] = news.get(group, 0) + 1
            if not group.unfinished:
                self._count_in_flight(group, -1)
                group.state = GroupState.READY
                of_step.num_ready += 1
                self._note_versions(of_step, group)
                self._changed()
                if of_step.is_ready:
                    self._changed_ready()
        self._changed_stored()
        return list(news.items())

    # --- trained on, and done ----------------------------------------------------------------------------------------

    def take(self, step: int, purpose: Purpose) -> None:
        """Note that a step's groups are trained on or evaluated. No engine is asked for them again."""
        for group in self._steps[step, purpose].groups:
            group.state = GroupState.TAKEN
            self._forget_engine(group)
        self._changed()

    def untake(self, step: int, purpose: Purpose) -> list[SampleGroup]:
        """Note that a step's groups have yet to be trained on after all, and return them."""
        groups = self._steps[step, purpose].groups
        for group in groups:
            group.state = GroupState.READY
            self._of_engine.setdefault(str(group.engine), {})[group] = None
        self._changed()
        self._changed_ready()
        return groups

    def remove(self, step: int, purpose: Purpose) -> None:
        """Forget the groups of a step that is done."""
        of_step = self._steps.pop((step, purpose), None)
        for group in of_step.groups if of_step is not None else []:
            self._forget_engine(group)
            self._await_tokens(group, -len(group.unfinished))
        for of_engine in self._stored.values() if purpose == "train" else ():
            of_engine.pop(step, None)
        self._changed()
        self._changed_stored()

    def clear(self) -> None:
        """Forget all groups, except those trained on or evaluated, because the run ends."""
        self._of_request.clear()
        self._changed()
        for step, purpose in [*self._steps]:
            groups = self._steps[step, purpose].groups
            if not any(group.state is GroupState.TAKEN for group in groups):
                self.remove(step, purpose)

    # --- lost, and waiting again -------------------------------------------------------------------------------------

    def put_back(self, groups: Iterable[SampleGroup]) -> None:
        """Let groups wait again, without what was made of them."""
        changed: dict[str, None] = {}
        for group in groups:
            of_step = self._steps[group.step, group.purpose]
            of_step.num_ready -= group.state is GroupState.READY
            assert group.engine is not None, "only what was assigned is put back"
            del self._of_engine[group.engine][group]
            self._await_tokens(group, -len(group.unfinished))
            self._count_in_flight(group, -(group.state is GroupState.IN_FLIGHT))
            group.state = GroupState.WAITING
            group.unfinished, group.results = set(), {}
            group.oldest_version, group.newest_version = NO_VERSION, -1
            if of_step.newest_versions.pop(group.engine, None) is not None:
                changed[group.engine] = None
        for engine in changed:
            for group in self.of_engine(engine, GroupState.READY):
                self._note_versions(self._steps[group.step, group.purpose], group)
        self._changed()
        self._changed_stored()

    def forget_stored(self, engine: str) -> None:
        """Note that a rollout is lost, with all that it kept."""
        self._stored.pop(engine, None)
        self._changed_stored()

    # --- what is counted ---------------------------------------------------------------------------------------------

    def _await_tokens(self, group: SampleGroup, num_samples: int) -> None:
        if group.purpose == "train" and group.engine is not None:
            awaited = self._awaited.get(group.engine, 0) + num_samples * group.size.num_tokens
            self._awaited[group.engine] = awaited

    def _count_in_flight(self, group: SampleGroup, change: int) -> None:
        assert group.engine is not None, "only what was assigned is in flight"
        counts = self._num_in_flight[group.purpose]
        counts[group.engine] = counts.get(group.engine, 0) + change
        if not counts[group.engine]:
            del counts[group.engine]

    def _note_versions(self, of_step: StepGroups, group: SampleGroup) -> None:
        newest, engine = of_step.newest_versions, str(group.engine)
        newest[engine] = max(newest.get(engine, -1), group.newest_version)

    def _forget_engine(self, group: SampleGroup) -> None:
        if group.engine is not None:
            if group.state is GroupState.IN_FLIGHT:
                self._count_in_flight(group, -1)
            self._of_engine.get(group.engine, {}).pop(group, None)


class RestoredGroups:
    """The restored groups, until their step has trained."""

    def __init__(self, groups: Mapping[Place, RestoredGroup]) -> None:
        self.groups = dict(groups)
        self._restored: set[int] = set()
        """The ids of the commands that restored groups from disk."""

    def has(self, group: SampleGroup) -> bool:
        """Tell whether a group is restored, and need not be generated."""
        return group.purpose == "train" and (group.step, group.number) in self.groups

    def is_restored(self, request: int) -> bool:
        """Tell whether a command restores groups from disk."""
        return request in self._restored

    def files(self, groups: Sequence[SampleGroup], request: int) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return the locations of these groups, which a command restores."""
        self._restored.add(request)
        locations: dict[str, list[tuple[int, int]]] = {}
        for group in groups:
            restored = self.groups[group.step, group.number]
            locations.setdefault(restored.file, []).append((restored.command_id, group.number))
        return {file: tuple(keys) for file, keys in locations.items()}

    def lose(self, groups: Sequence[SampleGroup]) -> None:
        """Note that groups cannot be read."""
        for group in groups:
            self.groups.pop((group.step, group.number), None)

    def drop_from(self, version: int) -> set[Place]:
        """Drop and return the groups made with this version of the weights, which differs now, or with a later one."""
        dropped = {place for place, group in self.groups.items() if group.newest_version >= version}
        for place in dropped:
            del self.groups[place]
        return dropped

    def forget(self, step: int) -> None:
        """Forget the groups of a step that is done."""
        for place in [place for place in self.groups if place[0] == step]:
            del self.groups[place]
