"""Engines that join a run while it goes on, and that are told to leave it: events in, actions out."""

from __future__ import annotations

import msgspec
import pytest
from cluster_harness import GRPO, Cluster, commands_of, lose, only_finish, replace

from tandem.common.messages import Failed, PlannedTransferGroup, PlanTransfers, Reply, TransfersPlanned
from tandem.coordinator.scheduler.engines.processes import JoinedProcesses
from tandem.coordinator.scheduler.events import (
    Action,
    AwaitedByHand,
    CommandErred,
    DispatchCommand,
    DispatchPrompts,
    EngineDraining,
    GroupSize,
    LetGo,
    ProcessJoined,
    ReplaceEngine,
    TellUser,
    TimePassed,
)
from tandem.coordinator.scheduler.groups.assignment import BalancedAssignment
from tandem.coordinator.scheduler.groups.table import GroupState, SampleGroup
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import RunSpec


def generating(spec: RunSpec = GRPO) -> Cluster:
    """Return a cluster whose engines generate for the first step."""
    cluster = Cluster(spec)
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    return cluster


def join(cluster: Cluster, name: str) -> list[Action]:
    return cluster.give(ProcessJoined(now=cluster.now, process=name, kind="rollout"))


def leave(cluster: Cluster, name: str) -> list[Action]:
    return cluster.give(EngineDraining(now=cluster.now, process=name))


def who_generate(cluster: Cluster, step: int) -> set[str]:
    """Return who was asked for groups of a step to train on."""
    asked = (command for command in cluster.commands if isinstance(command, DispatchPrompts) and command.groups)
    return {command.process for command in asked if (command.step, command.purpose) == (step, "train")}


def let_go(cluster: Cluster) -> list[LetGo]:
    return [action for action in cluster.done if isinstance(action, LetGo)]


def fail(cluster: Cluster, process: str, kind: str, error: str) -> list[Action]:
    """Have a member fail at a command of a kind; what it was asked for is answered by nobody."""
    (command,) = [
        a for a in cluster.pending if a.process == process and isinstance(a, DispatchCommand) and kind in str(a.command)
    ]
    cluster.pending.remove(command)
    failed = Failed(command_id=command.command.command_id, phase="x", error=error, expected=True)
    return cluster.give(CommandErred(now=cluster.now, process=process, failed=failed))


def test_an_engine_that_joins_is_planned_for_alone_and_generates_from_the_next_step_on() -> None:
    cluster = generating()
    since = len(cluster.commands)
    join(cluster, "rollout-2")
    cluster.run_until(RunPhase.FINISHED)
    commands = [
        (a.process, type(a.command).__name__) for a in cluster.commands[since:] if isinstance(a, DispatchCommand)
    ]
    of_newcomer = [kind for process, kind in commands if process == "rollout-2"]
    assert of_newcomer[:4] == ["BuildEngine", "InstallProgram", "Refit", "ReportDigests"]
    assert commands.count(("rollout-2", "InstallProgram")) == sum(kind == "InstallProgram" for _, kind in commands) == 1
    assert commands_of(cluster, PlanTransfers)[-1].destinations.keys() == {"rollout-0", "rollout-1", "rollout-2"}
    assert who_generate(cluster, 1) == {"rollout-0", "rollout-1"}
    assert who_generate(cluster, 3) == {"rollout-0", "rollout-1", "rollout-2"}
    assert cluster.commits() == [0, 1, 2, 3]


def test_an_engine_that_would_have_to_be_streamed_to_is_turned_away_and_the_run_goes_on() -> None:
    cluster = generating()

    def streamed(reply: Reply) -> Reply:
        if not isinstance(reply, TransfersPlanned):
            return reply
        return msgspec.structs.replace(
            reply, transfer_groups=(PlannedTransferGroup(name="m", members=("rollout-2", "trainer-0")),)
        )

    cluster.adjust = streamed
    join(cluster, "rollout-2")
    cluster.run_until(RunPhase.FINISHED)
    (gone,) = let_go(cluster)
    assert (gone.process, gone.is_awaited) == ("rollout-2", False)
    assert "the senders are fixed when a run begins" in gone.reason
    assert cluster.commits() == [0, 1, 2, 3]


@pytest.mark.parametrize(("process", "kind"), [("rollout-2", "BuildEngine"), ("refit-0", "PlanTransfers")])
def test_an_engine_that_cannot_join_is_turned_away_and_the_run_goes_on(process: str, kind: str) -> None:
    cluster = generating()
    join(cluster, "rollout-2")
    while not any(isinstance(a, DispatchCommand) and type(a.command).__name__ == kind for a in cluster.pending):
        cluster.answer_next()
    actions = fail(cluster, process, kind, "no memory")
    assert LetGo(process="rollout-2", reason="no memory") in actions
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]


def test_an_engine_that_is_lost_or_late_before_it_is_ready_is_no_loss() -> None:
    cluster = generating(msgspec.structs.replace(GRPO, max_replacements=0))
    join(cluster, "rollout-2")
    assert lose(cluster, "rollout-2") == [LetGo(process="rollout-2", reason="killed by SIGKILL")]
    join(cluster, "rollout-3")
    late = [a for a in cluster.pending if a.process == "rollout-3"]
    cluster.pending = [a for a in cluster.pending if a.process != "rollout-3"]
    assert len(late) == 1
    while not any(gone.process == "rollout-3" for gone in let_go(cluster)) and cluster.now < 40:
        cluster.now += 5
        cluster.give(TimePassed(now=cluster.now))
    assert let_go(cluster)[-1].reason == "no answer within 20 s (building)"


def test_an_engine_that_is_told_to_leave_finishes_and_goes_once_its_samples_are_trained_on() -> None:
    cluster = generating()
    (said,) = leave(cluster, "rollout-1")
    assert said == TellUser(
        text="rollout-1 was told to leave: it gets nothing more, and goes when 2 rollout groups of its are trained on"
    )
    assert leave(cluster, "rollout-1") == [], "said again"
    cluster.run_until(RunPhase.TRAINING)
    assert not let_go(cluster), "trainers fetch from it"
    cluster.run_until(RunPhase.FINISHED)
    assert let_go(cluster) == [LetGo(process="rollout-1", reason="it was told to")]
    assert who_generate(cluster, 1) == {"rollout-0", "rollout-1"}
    assert who_generate(cluster, 2) == who_generate(cluster, 3) == {"rollout-0"}
    assert not [action for action in cluster.done if isinstance(action, ReplaceEngine)]
    assert cluster.commits() == [0, 1, 2, 3]
    assert cluster.tables.engines.departed == {"rollout-1"}


def test_an_engine_that_leaves_and_cannot_finish_goes_at_its_deadline_and_others_make_its_groups() -> None:
    deadlines = msgspec.structs.replace(GRPO.deadlines, leave=15)
    cluster = generating(msgspec.structs.replace(GRPO, max_replacements=0, deadlines=deadlines))
    leave(cluster, "rollout-1")
    cluster.pending = [a for a in cluster.pending if a.process != "rollout-1"]
    cluster.now += 16.0
    actions = cluster.give(TimePassed(now=cluster.now))
    why = "it did not leave within 15 s; 2 rollout groups of its are made again"
    assert LetGo(process="rollout-1", reason=why) in actions
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]


def test_an_engine_that_leaves_and_is_lost_is_not_replaced() -> None:
    cluster = generating(msgspec.structs.replace(GRPO, max_replacements=0))
    leave(cluster, "rollout-0")
    actions = lose(cluster, "rollout-0")
    assert [a for a in actions if isinstance(a, LetGo)] == [
        LetGo(process="rollout-0", reason="killed by SIGKILL; 3 rollout groups of its are made again")
    ]
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]


def test_an_engine_that_nobody_replaces_is_done_without_and_others_make_its_groups() -> None:
    cluster = generating()
    assert ReplaceEngine in [type(action) for action in lose(cluster, "rollout-1")]
    while any(a.process == "rollout-0" for a in cluster.pending):
        cluster.answer_next()
    cluster.now += 11.0
    actions = cluster.give(TimePassed(now=cluster.now))
    why = "it was lost, and no process has taken its place within 10 s"
    assert LetGo(process="rollout-1", reason=why) in actions
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]
    assert who_generate(cluster, 2) == who_generate(cluster, 3) == {"rollout-0"}
    assert cluster.tables.engines.departed == {"rollout-1"}


def test_an_engine_by_hand_that_is_lost_is_not_awaited_where_another_has_joined_before_that_was_known() -> None:
    cluster = generating()
    join(cluster, "rollout-2")
    while "rollout-2" not in cluster.tables.engines:
        cluster.answer_next()
    lose(cluster, "rollout-1")
    assert cluster.give(TimePassed(now=cluster.now)) == [], "it is launched again"
    cluster.give(AwaitedByHand(now=cluster.now, process="rollout-1"))
    actions = cluster.give(TimePassed(now=cluster.now))
    why = "it was lost, and as many others are there as the run began with"
    assert LetGo(process="rollout-1", reason=why) in actions
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]
    assert who_generate(cluster, 3) == {"rollout-0", "rollout-2"}


def test_an_engine_by_hand_that_is_lost_is_awaited_where_too_few_others_are_there() -> None:
    cluster = generating()
    lose(cluster, "rollout-1")
    cluster.give(AwaitedByHand(now=cluster.now, process="rollout-1"))
    assert not [a for a in cluster.give(TimePassed(now=cluster.now)) if isinstance(a, LetGo)]
    replace(cluster, "rollout-1")
    cluster.run_until(RunPhase.FINISHED)
    assert not let_go(cluster)


def test_an_engine_that_nobody_replaces_is_missed_where_no_other_is_there() -> None:
    cluster = generating(msgspec.structs.replace(GRPO, max_replacements=2))
    for engine in ("rollout-0", "rollout-1"):
        lose(cluster, engine)
    cluster.tables.requests.drop_all_but()
    cluster.now += 11.0
    finish = only_finish(cluster.give(TimePassed(now=cluster.now)))
    assert "no process has taken its place within 10 s" in str(finish.error)


def test_after_the_last_engine_the_run_waits_for_another() -> None:
    cluster = generating()
    for engine in ("rollout-0", "rollout-1"):
        leave(cluster, engine)
    while len(let_go(cluster)) < 2:
        cluster.answer_next()
    assert [(gone.process, gone.is_awaited) for gone in let_go(cluster)] == [("rollout-0", False), ("rollout-1", True)]
    assert cluster.commits() == [0], "the version of the first step is nowhere yet"
    join(cluster, "rollout-5")
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]
    assert who_generate(cluster, 2) == {"rollout-5"}
    assert cluster.tables.engines.departed == {"rollout-0", "rollout-1"}


def test_what_waits_for_an_engine_that_leaves_with_the_last_other_one_goes_to_whoever_joins() -> None:
    cluster = generating(msgspec.structs.replace(GRPO, max_trajectory_age_steps=2))
    while cluster.tables.step < 2:
        cluster.answer_next()
    for engine in ("rollout-0", "rollout-1"):
        leave(cluster, engine)
    while len(let_go(cluster)) < 2:
        cluster.answer_next()
    waiting = {group.engine for group in cluster.tables.groups if group.state is GroupState.WAITING}
    assert waiting == {let_go(cluster)[-1].process}, "the place that is vacant"
    join(cluster, "rollout-5")
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]


def test_the_run_waits_for_another_engine_as_long_as_for_any_process() -> None:
    cluster = generating()
    for engine in ("rollout-0", "rollout-1"):
        leave(cluster, engine)
    while len(let_go(cluster)) < 2:
        cluster.answer_next()
    cluster.pending.clear()
    cluster.tables.requests.drop_all_but()
    cluster.now += 11.0
    finish = only_finish(cluster.give(TimePassed(now=cluster.now)))
    assert "no process has taken its place within 10 s" in str(finish.error)


def test_the_last_engine_stays_for_the_last_step() -> None:
    cluster = generating(msgspec.structs.replace(GRPO, expected={"trainer": 2, "rollout": 1, "refit": 1}))
    while cluster.tables.step < 3:
        cluster.answer_next()
    (said,) = leave(cluster, "rollout-0")
    assert isinstance(said, TellUser)
    assert "stays for what is left of the last step" in said.text
    assert leave(cluster, "rollout-0") == [], "said once"
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]
    assert let_go(cluster) == []


def test_the_last_of_those_that_were_told_to_leave_before_the_last_step_was_trained_stays_to_validate_it() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, validate_every=1, max_trajectory_age_steps=2))
    cluster.join_all()
    while (cluster.tables.step, cluster.tables.phase) != (2, RunPhase.SAVING):
        cluster.answer_next()
    for engine in ("rollout-0", "rollout-1"):
        leave(cluster, engine)
    cluster.run_until(RunPhase.FINISHED)
    assert [gone.process for gone in let_go(cluster)] == ["rollout-0"]
    said = [action.text for action in cluster.done if isinstance(action, TellUser)]
    assert any("rollout-1 was told to leave, and stays for what is left of the last step" in text for text in said)
    assert cluster.commits() == [0, 1, 2, 3]


def test_a_term_expects_nobody_who_has_left_and_somebody_at_all() -> None:
    processes = JoinedProcesses({"trainer": 1, "rollout": 2}, departed=("rollout-0", "rollout-1"))
    processes.add("trainer-0", "trainer")
    assert (processes.is_complete, processes.missing()) == (False, "1 rollout")
    processes.add("rollout-7", "rollout")
    assert (processes.is_complete, processes.missing()) == (True, "")


def test_who_leaves_is_not_idle_and_whoever_joins_gets_groups_that_wait() -> None:
    balanced = BalancedAssignment(width=1, timeout_s=5.0)
    groups = [SampleGroup(1, "train", number, GroupSize(num_samples=1, num_tokens=1)) for number in range(3)]
    balanced.add(groups, ["rollout-0"])
    assert balanced.choose(lambda engine, group: True, 0.0) == {"rollout-0": groups[:1]}
    balanced.withdraw("rollout-1")
    assert balanced.choose(lambda engine, group: True, 1.0) == {"rollout-1": groups[1:2]}
    balanced.finished("rollout-1", groups[1], 1)
    balanced.move("rollout-1", ["rollout-0"])
    assert [balanced.overstayed(now) for now in (2.0, 20.0)] == [[], []]
    balanced.forget("rollout-1")
    assert balanced.choose(lambda engine, group: True, 21.0) == {}
