"""Which engine generates for which groups where ``async_engine`` is on: events in, actions out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from cluster_harness import GRPO, Cluster, answer, lose, replace, result

from tandem.common.messages import SamplesFinished
from tandem.coordinator.scheduler.events import (
    Action,
    DiscardSamples,
    DispatchCommand,
    DispatchPrompts,
    DrawPrompts,
    EngineDraining,
    GroupSize,
    ProcessReplied,
    TimePassed,
)
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import EngineBalance

NUM_SAMPLES = 2


class Balanced(Cluster):
    """A cluster of engines that share by tokens; groups ask for what `tokens` says, the others answer at once."""

    num_samples = NUM_SAMPLES

    def __init__(
        self, tokens: Sequence[int], *, width: int = 4, timeout_s: float | None = None, engines: int = 2
    ) -> None:
        shape = msgspec.structs.replace(
            GRPO,
            num_groups=len(tokens),
            validate_every=0,
            validate_at_start=False,
            save_every=0,
            expected={"trainer": 1, "rollout": engines, "refit": 1},
            balance=EngineBalance(width=width, timeout_s=timeout_s),
        )
        super().__init__(shape)
        self.tokens = tokens
        self.counted: dict[tuple[int, int], int] = {}
        """Samples of the step that count, and how often."""
        self.join_all()
        self.run_until(RunPhase.GENERATING)
        while self.verifying():
            self.answer_next()

    def size_of(self, drawn: DrawPrompts, group: int) -> GroupSize:
        assert drawn.groups == range(len(self.tokens))
        return GroupSize(num_samples=NUM_SAMPLES, num_tokens=self.tokens[group])

    def verifying(self) -> bool:
        self.pending.sort(key=lambda a: isinstance(a, DispatchPrompts))
        return isinstance(self.pending[0], DispatchCommand)

    def give(self, event: object) -> list[Action]:
        actions = super().give(event)
        for action in actions:
            if isinstance(action, DiscardSamples):
                self.counted = {key: n for key, n in self.counted.items() if key[0] not in action.groups}
        return actions

    def holds(self) -> dict[str, list[int]]:
        """Return the groups that each engine was asked for and that are not answered, in order."""
        held: dict[str, list[int]] = {}
        for action in self.pending:
            if isinstance(action, DispatchPrompts):
                held.setdefault(action.process, []).extend(action.groups)
        return held

    def sample(self, engine: str, group: int, *samples: int) -> list[Action]:
        """Have an engine finish samples of a group; with the last of a command, answer the command."""
        command = next(a for a in self.commands if is_for(a, engine, group) and self.waits_for(a))
        assert isinstance(command, DispatchPrompts)
        for sample in samples:
            self.counted[group, sample] = self.counted.get((group, sample), 0) + 1
        scored = tuple(result(group, sample) for sample in samples)
        reply = SamplesFinished(
            command_id=command.command_id, step=command.step, purpose=command.purpose, samples=scored
        )
        return self.give(ProcessReplied(now=self.now, process=engine, reply=reply))

    def complete(self, engine: str, group: int) -> list[Action]:
        """Have an engine finish a group, and answer its command if that was all of it."""
        actions = self.sample(engine, group, *range(NUM_SAMPLES))
        command = next(a for a in self.pending if is_for(a, engine, group))
        assert isinstance(command, DispatchPrompts)
        if all((g, s) in self.counted for g in command.groups for s in range(NUM_SAMPLES)):
            self.pending.remove(command)
            actions += self.give(ProcessReplied(now=self.now, process=engine, reply=answer(command)))
        return actions

    def waits_for(self, action: object) -> bool:
        assert isinstance(action, DispatchPrompts)
        return action.command_id in self.tables.requests

    def tick(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.give(TimePassed(now=self.now))


def is_for(action: object, engine: str, group: int) -> bool:
    return isinstance(action, DispatchPrompts) and action.process == engine and group in action.groups


def prompts(actions: list[Action]) -> list[tuple[str, tuple[int, ...]]]:
    return [(a.process, a.groups) for a in actions if isinstance(a, DispatchPrompts)]


def test_a_group_goes_to_the_engine_with_the_fewest_tokens_to_make() -> None:
    cluster = Balanced([90, 20, 20, 20, 20, 20, 20], width=20)
    # By count it would be every other one.
    assert cluster.holds() == {"rollout-0": [0, 6], "rollout-1": [1, 2, 3, 4, 5]}


def test_an_engine_gets_no_more_than_it_has_room_for_until_samples_are_done() -> None:
    cluster = Balanced([10] * 7, width=4)
    assert cluster.holds() == {"rollout-0": [0, 2], "rollout-1": [1, 3]}
    assert prompts(cluster.sample("rollout-1", 3, 1)) == [("rollout-1", (4,))]
    assert cluster.sample("rollout-1", 3, 1) == []  # the same once more
    assert prompts(cluster.sample("rollout-1", 3, 0)) == []  # it has four to make
    assert prompts(cluster.sample("rollout-0", 0, 0)) == [("rollout-0", (5,))]
    first, *later = [a for a in cluster.commands if isinstance(a, DispatchPrompts) and a.process == "rollout-1"]
    assert first.cancel_before == first.command_id
    assert [a.cancel_before for a in later] == [first.command_id]  # all of them count


def test_the_fast_engine_makes_more() -> None:
    cluster = Balanced([10] * 12, width=2)
    made = []
    while "rollout-1" in cluster.holds() and cluster.holds()["rollout-1"] != [1]:
        cluster.complete("rollout-1", cluster.holds()["rollout-1"][0])
    for _ in range(10):
        made.append(cluster.holds()["rollout-1"][0])
        cluster.complete("rollout-1", made[-1])
    assert sorted(made) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert cluster.holds() == {"rollout-0": [0], "rollout-1": [11]}


def test_training_begins_when_every_group_is_done() -> None:
    cluster = Balanced([10] * 6, width=2)
    for _ in range(100):
        if cluster.tables.phase is RunPhase.TRAINING:
            break
        engine, groups = next(iter(cluster.holds().items()))
        cluster.complete(engine, groups[0])
    assert cluster.tables.phase is RunPhase.TRAINING
    assert cluster.counted == {(g, s): 1 for g in range(6) for s in range(NUM_SAMPLES)}
    cluster.run_until(RunPhase.GENERATING)
    assert cluster.tables.step == 2
    assert {a.step for a in cluster.pending if isinstance(a, DispatchPrompts)} == {2}


def slow_one(timeout_s: float | None, engines: int = 2) -> Balanced:
    """Have every engine but the first finish its groups; it finishes one group and half of another."""
    cluster = Balanced([10] * (3 * engines), width=6, timeout_s=timeout_s, engines=engines)
    first, second, _ = cluster.holds()["rollout-0"]
    cluster.sample("rollout-0", first, 0, 1)
    cluster.sample("rollout-0", second, 1)
    for engine, groups in cluster.holds().items():
        for group in groups if engine != "rollout-0" else []:
            cluster.complete(engine, group)
    return cluster


def test_what_a_slow_engine_holds_moves_on_when_another_has_waited_long_enough() -> None:
    cluster = slow_one(timeout_s=5.0)
    late = [a for a in cluster.pending if isinstance(a, DispatchPrompts)]
    cluster.tick(20.0)  # only now it is known that somebody waits
    assert cluster.tick(4.9) == []
    stop, discard, moved = cluster.tick(0.2)
    assert isinstance(stop, DispatchPrompts)
    assert isinstance(moved, DispatchPrompts)
    assert (stop.process, stop.groups) == ("rollout-0", ())
    assert stop.cancel_before > late[0].command_id
    assert discard == DiscardSamples(step=1, purpose="train", groups=(2, 4))
    assert (moved.process, moved.groups) == ("rollout-1", (2, 4))
    # What the slow one still says is not counted, and its silence is not waited for.
    assert [cluster.waits_for(a) for a in (*late, stop, moved)] == [False, False, True]
    cluster.pending = [moved]
    cluster.complete("rollout-1", 2)
    cluster.complete("rollout-1", 4)
    assert cluster.tables.phase is RunPhase.TRAINING
    assert cluster.counted == {(g, s): 1 for g in range(6) for s in range(NUM_SAMPLES)}
    cluster.run_until(RunPhase.GENERATING)
    assert set(cluster.holds()) == {"rollout-0", "rollout-1"}  # it takes part in the next step


def test_without_a_timeout_everybody_is_waited_for() -> None:
    cluster = slow_one(timeout_s=None)
    for _ in range(20):
        assert cluster.tick(1.0) == []
    assert cluster.tables.phase is RunPhase.GENERATING


def test_nobody_is_slow_while_all_have_work() -> None:
    cluster = Balanced([10] * 6, width=6, timeout_s=5.0)
    for _ in range(25):
        assert cluster.tick(1.0) == []


def test_of_several_slow_engines_nothing_moves_to_one_of_them() -> None:
    cluster = slow_one(timeout_s=5.0, engines=3)
    cluster.tick(0.0)
    first = cluster.tick(5.1)
    assert {a.process for a in first if isinstance(a, DispatchPrompts) and a.groups} == {"rollout-1", "rollout-2"}
    cluster.pending = [a for a in first if isinstance(a, DispatchPrompts) and a.groups]
    held = cluster.holds()
    cluster.complete("rollout-2", held["rollout-2"][0])
    cluster.tick(0.0)
    moved = cluster.tick(5.1)
    assert prompts(moved) == [("rollout-1", ()), ("rollout-2", tuple(held["rollout-1"]))]
    cluster.pending = [a for a in moved if isinstance(a, DispatchPrompts) and a.groups]
    for _ in range(10):
        assert cluster.tick(1.0) == []  # nobody is left who could take over
    for group in held["rollout-1"]:
        cluster.complete("rollout-2", group)
    assert cluster.tables.phase is RunPhase.TRAINING


def test_a_slow_engine_gets_what_nobody_else_is_there_for_any_more() -> None:
    cluster = slow_one(timeout_s=5.0)
    cluster.tick(0.0)
    assert ("rollout-1", (2, 4)) in prompts(cluster.tick(5.1))
    assert prompts(lose(cluster, "rollout-1")) == [], "the other one was too slow"
    assert prompts(cluster.tick(GRPO.deadlines.join + 1)) == [("rollout-0", (1, 3, 5))], "nobody has replaced it"


def test_a_slow_engine_gets_what_one_that_leaves_would_have_got() -> None:
    cluster = slow_one(timeout_s=5.0, engines=3)
    cluster.tick(0.0)
    cluster.tick(5.1)
    assert {process for process, _ in prompts(lose(cluster, "rollout-1"))} == {"rollout-2"}
    assert {process for process, _ in prompts(cluster.give(EngineDraining(now=cluster.now, process="rollout-2")))} == {
        "rollout-0"
    }


def test_what_a_lost_engine_held_moves_on_at_once() -> None:
    cluster = Balanced([10] * 6, width=20)
    assert cluster.holds() == {"rollout-0": [0, 2, 4], "rollout-1": [1, 3, 5]}
    cluster.complete("rollout-1", 1)
    actions = lose(cluster, "rollout-1")
    # Also what it had done: its version was perhaps not what it should be.
    assert DiscardSamples(step=1, purpose="train", groups=(1, 3, 5)) in actions
    assert prompts(actions) == [("rollout-0", (1, 3, 5))]
    for group in (0, 2, 4, 1, 3, 5):
        cluster.complete("rollout-0", group)
    assert cluster.tables.phase is RunPhase.GENERATING  # the next refit needs the engine
    replace(cluster, "rollout-1")
    cluster.run_until(RunPhase.TRAINING)
    assert cluster.counted == {(g, s): 1 for g in range(6) for s in range(NUM_SAMPLES)}


def test_what_comes_back_gets_work_again() -> None:
    cluster = Balanced([10] * 9, width=4)
    assert cluster.holds() == {"rollout-0": [0, 2], "rollout-1": [1, 3]}
    lose(cluster, "rollout-1")
    replace(cluster, "rollout-1")
    while "rollout-1" not in cluster.holds():
        cluster.pending.sort(key=lambda a: isinstance(a, DispatchPrompts))
        cluster.answer_next()
    assert cluster.holds() == {"rollout-0": [0, 2], "rollout-1": [4, 5]}
