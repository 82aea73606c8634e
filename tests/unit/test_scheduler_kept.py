"""Resuming with what had been generated: it is trained on as it is while the weights are the same, and not longer."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
import pytest
from cluster_harness import GRPO, Cluster, lose, numbers_of, replace

from tandem.common.messages import Failed, RestoreSamples
from tandem.coordinator.scheduler.events import (
    Action,
    CommandErred,
    DispatchBatch,
    DispatchCommand,
    DispatchPrompts,
    DropRestored,
    FinishRun,
    Place,
    RestoredGroup,
    TellUser,
)
from tandem.coordinator.scheduler.groups.table import GroupState
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import DynamicSampling, EngineBalance, RunSpec

SPEC = msgspec.structs.replace(
    GRPO,
    first_step=3,
    last_step=6,
    resume_from="ck/2",
    validate_every=0,
    validate_at_start=False,
    max_replacements=100,
)
NUM_GROUPS = SPEC.num_groups


def kept_of(*steps: int, age: int = 0) -> dict[Place, RestoredGroup]:
    """Return all groups of steps as they are kept, made with weights of an age."""
    return {
        (step, number): RestoredGroup(file=f"aside/{number % 2}", command_id=100 + step, newest_version=step - 1 - age)
        for step in steps
        for number in range(NUM_GROUPS)
    }


def resumed(kept: Mapping[Place, RestoredGroup], spec: RunSpec = SPEC) -> Cluster:
    cluster = Cluster(spec, kept)
    cluster.join_all()
    return cluster


def restored(cluster: Cluster) -> dict[int, list[int]]:
    """Return the groups of each step that were taken from disk."""
    found: dict[int, list[int]] = {}
    for action in cluster.commands:
        if isinstance(action, DispatchCommand) and isinstance(action.command, RestoreSamples):
            found[action.command.step] = sorted([*found.get(action.command.step, []), *numbers_of(action.command)])
    return found


def made(cluster: Cluster) -> dict[int, list[int]]:
    """Return the groups of each step that were generated."""
    found: dict[int, list[int]] = {}
    for action in cluster.commands:
        if isinstance(action, DispatchPrompts) and action.groups:
            found[action.step] = sorted([*found.get(action.step, []), *action.groups])
    return found


def drops(cluster: Cluster) -> list[DropRestored]:
    return [action for action in cluster.done if isinstance(action, DropRestored)]


ALL = list(range(NUM_GROUPS))


def test_steps_that_are_kept_are_trained_on_again_without_generating() -> None:
    cluster = resumed(kept_of(3, 4))
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [3, 4, 5, 6]
    assert restored(cluster) == {3: ALL, 4: ALL}
    assert made(cluster) == {5: ALL, 6: ALL}
    assert drops(cluster) == []
    commands = [
        a.command for a in cluster.commands if isinstance(a, DispatchCommand) and isinstance(a.command, RestoreSamples)
    ]
    assert {file: keys for command in commands if command.step == 3 for file, keys in command.files.items()} == {
        "aside/0": ((103, 0), (103, 2), (103, 4)),
        "aside/1": ((103, 1), (103, 3)),
    }


def test_a_part_of_a_step_is_used_as_well() -> None:
    kept = {place: group for place, group in kept_of(3).items() if place[1] != 2}
    cluster = resumed(kept)
    cluster.run_until(RunPhase.FINISHED)
    assert restored(cluster) == {3: [0, 1, 3, 4]}
    assert made(cluster) == {3: [2], 4: ALL, 5: ALL, 6: ALL}
    assert drops(cluster) == [], "there was nothing that it changes"


def test_once_a_group_is_made_again_nothing_counts_that_its_weights_have_made() -> None:
    kept = {place: group for place, group in kept_of(3, 4, 5).items() if place != (4, 2)}
    cluster = resumed(kept)
    cluster.run_until(RunPhase.FINISHED)
    assert restored(cluster) == {3: ALL, 4: [0, 1, 3, 4]}
    assert made(cluster) == {4: [2], 5: ALL, 6: ALL}
    assert drops(cluster) == [DropRestored(version=4, num_groups=NUM_GROUPS)]


def test_what_older_weights_have_made_counts_still() -> None:
    young, old = kept_of(3, 4, 5), kept_of(5, age=1)
    kept = young | {place: group for place, group in old.items() if place[1] < 3}
    del kept[4, 2]
    cluster = resumed(kept, msgspec.structs.replace(SPEC, max_trajectory_age_steps=1))
    cluster.run_until(RunPhase.FINISHED)
    assert restored(cluster)[5] == [0, 1, 2], "version 3 is as it was, version 4 is not"
    assert made(cluster)[5] == [3, 4]
    assert drops(cluster) == [DropRestored(version=4, num_groups=2)]


def test_what_cannot_be_read_is_made_again_and_what_follows_from_it() -> None:
    kept = {**kept_of(3, age=1), **kept_of(4)}
    cluster = resumed(kept, msgspec.structs.replace(SPEC, max_trajectory_age_steps=1))
    for _ in range(200):
        commands = [
            a for a in cluster.pending if isinstance(a, DispatchCommand) and isinstance(a.command, RestoreSamples)
        ]
        if any(a.command.step == 4 for a in commands) and not any(a.command.step == 3 for a in commands[1:]):
            break
        later = [a for a in cluster.pending if a not in commands]
        cluster.pending = [*later, *sorted(commands, key=lambda a: -a.command.step)]
        if commands and not later:
            break
        cluster.answer_next()
    while any(a.command.step == 4 for a in commands):  # the later step is there first
        cluster.pending.insert(0, cluster.pending.pop(cluster.pending.index(commands[0])))
        commands = [a for a in commands if a is not commands[0]]
        cluster.answer_next()
    (bad, *_) = [a for a in cluster.pending if isinstance(a, DispatchCommand) and isinstance(a.command, RestoreSamples)]
    assert bad.command.step == 3
    cluster.pending.remove(bad)
    failed = Failed(command_id=bad.command.command_id, phase="restoring samples", error="x is damaged", expected=True)
    actions = cluster.give(CommandErred(now=cluster.now, process=bad.process, failed=failed))
    assert TellUser(text="x is damaged; they are generated again") in actions
    assert [action for action in actions if isinstance(action, DropRestored)] == [DropRestored(version=3, num_groups=5)]
    assert not [
        group
        for group in cluster.tables.groups
        if group.step == 4 and group.state is GroupState.READY and cluster.tables.restored.is_restored(group.request)
    ]
    cluster.run_until(RunPhase.FINISHED)
    assert made(cluster)[3] == numbers_of(bad.command)
    assert made(cluster)[4] == ALL


def test_what_a_lost_rollout_had_from_disk_is_taken_from_there_again() -> None:
    cluster = resumed(kept_of(3))
    while not restored(cluster):
        cluster.answer_next()
    engine = next(
        a.process for a in cluster.pending if isinstance(a, DispatchCommand) and isinstance(a.command, RestoreSamples)
    )
    lose(cluster, engine)
    replace(cluster, engine)
    cluster.run_until(RunPhase.FINISHED)
    assert 3 not in made(cluster)
    assert cluster.commits() == [3, 4, 5, 6]


def test_what_dynamic_sampling_had_drawn_is_kept_to_the_last_batch() -> None:
    spec = msgspec.structs.replace(SPEC, dynamic_sampling=DynamicSampling(num_groups=4, max_batches=5))
    kept = {
        (step, number): RestoredGroup(file="aside/0", command_id=9, newest_version=step - 1)
        for step in (3, 4)
        for number in range(12)
    }
    cluster = Cluster(spec, kept)
    cluster.tables.is_informative = lambda results: results[0].group % 2 == 0
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    assert restored(cluster) == {3: [*range(12)], 4: [*range(12)]}
    assert sorted(made(cluster)) == [5, 6]


# --- in any order, with failures -------------------------------------------------------------------------------------


class Resumed(Cluster):
    """A resumed cluster in which anything is answered at any time, what is on disk may be damaged, engines are lost."""

    def __init__(self, seed: int, age: int, balance: EngineBalance | None, *, in_flight: bool) -> None:
        self.random = random.Random(seed)
        self.pure: set[int] = set(range(SPEC.first_step))
        """Steps that were trained on what they were trained on the first time, and on nothing else."""
        self.num_restored = 0
        share = self.random.choice([0.5, 0.97, 1.0])
        kept = {
            (step, number): RestoredGroup(
                file=f"aside/{self.random.randrange(3)}",
                command_id=step,
                newest_version=self.random.randint(max(0, step - 1 - age), step - 1),
            )
            for step in range(SPEC.first_step, SPEC.last_step + 1)
            for number in range(NUM_GROUPS)
            if self.random.random() < share
        }
        spec = msgspec.structs.replace(
            SPEC, max_trajectory_age_steps=age, balance=balance, updates_in_flight=age > 0 and in_flight
        )
        super().__init__(spec, kept)

    def give(self, event: object) -> list[Action]:
        actions = super().give(event)
        for action in actions:
            if isinstance(action, DispatchBatch):
                self.check_lineage(action.step)
        return actions

    def check_lineage(self, step: int) -> None:
        """Assert that what is trained on from before was made with weights that are still the same."""
        of_step = self.tables.groups.of_step(step, "train")
        assert of_step is not None
        old = [group for group in of_step.groups if self.tables.restored.is_restored(group.request)]
        self.num_restored += len(old)
        for group in old:
            steps = set(range(self.kept[step, group.number].newest_version + 1))
            assert steps <= self.pure, f"step {step}, group {group.number}: {steps - self.pure} are others"
        if len(old) == len(of_step.groups):
            self.pure.add(step)

    def run(self, chance_of_loss: float, chance_of_damage: float) -> None:
        self.join_all()
        absent: list[str] = []
        for _ in range(5000):
            if self.tables.phase is RunPhase.FINISHED:
                return
            if absent and (not self.pending or self.random.random() < 0.2):
                replace(self, absent.pop())
                continue
            if self.tables.steps.has_started and not absent and self.random.random() < chance_of_loss:
                absent.append(f"rollout-{self.random.randrange(2)}")
                lose(self, absent[0])
                continue
            action = self.pending.pop(self.random.randrange(len(self.pending)))
            is_read = isinstance(action, DispatchCommand) and isinstance(action.command, RestoreSamples)
            if is_read and self.random.random() < chance_of_damage:
                command_id = action.command.command_id  # type: ignore[union-attr]
                failed = Failed(command_id=command_id, phase="restoring", error="damaged", expected=True)
                self.give(CommandErred(now=self.now, process=action.process, failed=failed))
            else:
                self.pending.insert(0, action)
                self.answer_next()
        raise AssertionError(f"the run stands still in step {self.tables.step}, {self.tables.phase.value}")


@pytest.mark.parametrize("balance", [None, EngineBalance(width=2, timeout_s=None)])
@pytest.mark.parametrize("age", [0, 1, 2])
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(("chance_of_loss", "chance_of_damage"), [(0.0, 0.0), (0.03, 0.0), (0.02, 0.1)])
def test_nothing_is_trained_on_that_other_weights_have_made(
    age: int, balance: EngineBalance | None, in_flight: bool, chance_of_loss: float, chance_of_damage: float
) -> None:
    num_restored, num_pure = 0, 0
    for seed in range(12):
        cluster = Resumed(seed, age, balance, in_flight=in_flight)
        cluster.run(chance_of_loss, chance_of_damage)
        assert cluster.commits() == [3, 4, 5, 6]
        assert cluster.done[-1] == FinishRun(outcome="finished")
        if len(cluster.kept) == 4 * NUM_GROUPS and not chance_of_damage:
            assert cluster.pure == {*range(7)}, "nothing was generated"
            assert made(cluster) == {}
        num_restored += cluster.num_restored
        num_pure += len(cluster.pure) - SPEC.first_step
    assert num_restored > num_pure * NUM_GROUPS > 0
