"""The table of rollout groups, as groups wait again, are given up, or run ahead."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.common.messages import Purpose
from tandem.coordinator.scheduler.groups.table import NO_VERSION, Group, Groups, GroupState


class GroupTable(Groups):
    """All groups of steps that are not done."""

    def of_engine(self, engine: str, *states: GroupState) -> list[Group]:
        """Return the groups of an engine in these states, in the order in which they were assigned."""
        return [group for group in self._of_engine.get(engine, {}) if group.state in states]

    def put_back(self, groups: Iterable[Group]) -> None:
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

    def forget_stored(self, engine: str) -> None:
        """Note that a rollout is lost, with all that it kept."""
        self._stored.pop(engine, None)
        self._changed_stored()

    def untake(self, step: int, purpose: Purpose) -> list[Group]:
        """Note that a step's groups have yet to be trained on after all, and return them."""
        groups = self._steps[step, purpose].groups
        for group in groups:
            group.state = GroupState.READY
            self._of_engine.setdefault(str(group.engine), {})[group] = None
        self._changed()
        self._changed_ready()
        return groups

    def clear(self) -> None:
        """Forget all groups, except those trained on or evaluated, because the run ends."""
        self._of_request.clear()
        self._changed()
        for step, purpose in [*self._steps]:
            groups = self._steps[step, purpose].groups
            if not any(group.state is GroupState.TAKEN for group in groups):
                self.remove(step, purpose)
