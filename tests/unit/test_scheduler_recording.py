"""The scheduler and the record of samples: each step is recorded beside what follows, and nothing waits for it long."""

from __future__ import annotations

import msgspec
import pytest
from cluster_harness import GRPO, Cluster, SentBatch, answer, interrupt, lose, replace

from tandem.common.messages import Failed, SamplesRecorded, Trained
from tandem.coordinator.scheduler.events import (
    Action,
    CommandErred,
    DispatchRecord,
    FinishRun,
    ProcessReplied,
    PublishCheckpoint,
    StepRecorded,
    StepValidated,
    TellUser,
    TimePassed,
)
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import RunSpec

SPEC = msgspec.structs.replace(
    GRPO, samples_folder="run/samples", validate_every=0, validate_at_start=False, save_every=1, max_replacements=2
)


def held(cluster: Cluster) -> list[DispatchRecord]:
    """Take the commands to record out of those that are answered next."""
    found = [action for action in cluster.pending if isinstance(action, DispatchRecord)]
    cluster.pending = [action for action in cluster.pending if action not in found]
    return found


def until_recording(spec: RunSpec = SPEC) -> tuple[Cluster, list[DispatchRecord]]:
    """Return a cluster whose first step has just trained, and the commands to record it."""
    cluster = Cluster(spec)
    cluster.join_all()
    while not (found := held(cluster)):
        cluster.answer_next()
    return cluster, found


def say_recorded(cluster: Cluster, commands: list[DispatchRecord], **fields: int) -> list[Action]:
    actions: list[Action] = []
    for command in commands:
        reply = answer(command)
        assert isinstance(reply, SamplesRecorded)
        told = msgspec.structs.replace(reply, **fields)
        actions += cluster.give(ProcessReplied(now=cluster.now, process=command.process, reply=told))
    return actions


def fail(cluster: Cluster, command: DispatchRecord, error: str = "no space left") -> list[Action]:
    failed = Failed(command_id=command.command_id, phase="recording samples", error=error, expected=True)
    return cluster.give(CommandErred(now=cluster.now, process=command.process, failed=failed))


def recorded(cluster: Cluster) -> list[int]:
    return [action.step for action in cluster.done if isinstance(action, StepRecorded)]


def published(cluster: Cluster) -> list[int]:
    return [action.step for action in cluster.done if isinstance(action, PublishCheckpoint)]


def said(cluster: Cluster) -> list[str]:
    return [action.text for action in cluster.done if isinstance(action, TellUser)]


def test_every_rollout_records_what_each_step_had_of_it() -> None:
    cluster = Cluster(SPEC)
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    commands = [action for action in cluster.commands if isinstance(action, DispatchRecord)]
    assert [(o.step, o.rollout, o.process) for o in commands] == [
        (step, rollout, rollout) for step in (1, 2, 3) for rollout in ("rollout-0", "rollout-1")
    ]
    assert [action for action in cluster.done if isinstance(action, StepRecorded)] == [
        StepRecorded(step=step, rollouts=("rollout-0", "rollout-1"), num_bytes=200) for step in (1, 2, 3)
    ]


def test_nothing_is_recorded_before_every_rank_has_trained_nor_where_no_record_is_kept() -> None:
    cluster = Cluster(SPEC)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    last = [action for action in cluster.pending if isinstance(action, SentBatch)][-1]
    while cluster.pending[0] is not last:
        cluster.answer_next()
    assert not held(cluster)
    reply = answer(last)
    assert isinstance(reply, Trained)
    assert any(
        isinstance(action, DispatchRecord)
        for action in cluster.give(ProcessReplied(now=cluster.now, process=last.process, reply=reply))
    )
    off = Cluster(msgspec.structs.replace(SPEC, samples_folder=""))
    off.join_all()
    off.run_until(RunPhase.FINISHED)
    assert not [action for action in off.commands if isinstance(action, DispatchRecord)]


def test_what_validated_a_step_is_recorded_like_what_it_trained_on_and_holds_up_no_step() -> None:
    cluster = Cluster(msgspec.structs.replace(SPEC, validate_every=2, validate_at_start=True, save_every=3))
    cluster.join_all()
    owed: list[DispatchRecord] = []
    for _ in range(300):
        if not cluster.pending:
            break
        cluster.answer_next()
        owed += held(cluster)
    assert cluster.commits() == [0, 1, 2, 3]
    validation = [command for command in owed if command.purpose == "validate"]
    assert sorted({command.step for command in validation}) == [0, 2, 3], "at the start, every other step, and the last"
    kept = {action.step: action.records for action in cluster.done if isinstance(action, StepValidated)}
    assert [*kept] == [0, 2, 3]
    for step, records in kept.items():
        assert sorted(record.scored.group for record in records) == [0, 1, 2]
        assert {record.rollout for record in records} == {
            command.rollout for command in validation if command.step == step
        }
    assert published(cluster) == [], "the record is part of what is published"
    fail(cluster, validation[0])
    say_recorded(cluster, [command for command in owed if command is not validation[0]])
    assert said(cluster) == [
        f"validation samples of step 0 are missing in the record: those of {validation[0].rollout}: no space left"
    ]
    assert published(cluster) == [3]
    done = [action for action in cluster.done if isinstance(action, StepRecorded)]
    assert sorted((action.step, action.purpose) for action in done) == [
        (0, "validate"), (1, "train"), (2, "train"), (2, "validate"), (3, "train"), (3, "validate"),
    ]  # fmt: skip
    off = Cluster(msgspec.structs.replace(SPEC, samples_folder="", validate_at_start=True))
    off.join_all()
    off.run_until(RunPhase.FINISHED)
    assert not [action for action in off.done if isinstance(action, StepValidated)]


def test_the_next_steps_do_not_wait_but_checkpoints_and_the_end_do() -> None:
    cluster, owed = until_recording(msgspec.structs.replace(SPEC, save_every=3))
    for _ in range(200):
        if not cluster.pending:
            break
        cluster.answer_next()
        owed += held(cluster)
    assert cluster.commits() == [1, 2, 3], "all that is left is the record"
    assert sorted({command.step for command in owed}) == [1, 2, 3]
    assert cluster.tables.phase is not RunPhase.FINISHED
    assert published(cluster) == []
    say_recorded(cluster, [command for command in owed if command.step == 3])
    assert published(cluster) == [], "it is made of step 1 as well"
    actions = say_recorded(cluster, [command for command in owed if command.step < 3])
    assert published(cluster) == [3]
    assert actions[-1] == FinishRun(outcome="finished")


@pytest.mark.parametrize("replaced", [False, True])
def test_another_rollout_records_what_a_lost_one_had(replaced: bool) -> None:
    cluster, owed = until_recording()
    lost, other = owed
    if replaced:  # the only other one is lost as well
        lose(cluster, other.process)
    lose(cluster, lost.process)
    again = held(cluster)
    if replaced:
        assert again == []
        replace(cluster, lost.process)
        cluster.answer_next()  # its engine is built
        again = held(cluster)
        assert {(command.rollout, command.process) for command in again} == {
            ("rollout-0", "rollout-0"),
            ("rollout-1", "rollout-0"),
        }
    else:
        assert [(command.rollout, command.process) for command in again] == [(lost.rollout, other.process)]
        again.append(other)
    say_recorded(cluster, [lost])
    assert recorded(cluster) == [], "nobody waits for who is lost"
    say_recorded(cluster, again)
    assert recorded(cluster) == [1]


def test_a_part_that_cannot_be_written_is_said_once_and_stops_nothing() -> None:
    cluster, owed = until_recording()
    fail(cluster, owed[0])
    say_recorded(cluster, owed[1:])
    assert [action for action in cluster.done if isinstance(action, StepRecorded)] == [
        StepRecorded(step=1, rollouts=("rollout-1",), num_bytes=100)
    ]
    for _ in range(200):
        if cluster.tables.phase is RunPhase.FINISHED:
            break
        for command in held(cluster):
            fail(cluster, command, "no space left")
        cluster.answer_next()
    assert cluster.done[-1] == FinishRun(outcome="finished")
    assert published(cluster) == [1, 2, 3]
    assert said(cluster) == [
        f"samples of step {step} are missing in the record: those of {rollout}: no space left"
        for step, rollout in ((1, "rollout-0"), (2, "rollout-1"))
    ]


def test_samples_that_were_never_written_are_said() -> None:
    cluster, owed = until_recording()
    say_recorded(cluster, owed, num_missing=3)
    assert said(cluster) == [
        f"samples of step 1 are missing in the record: 3 samples of rollout-{i} were not written when they finished"
        for i in range(2)
    ]
    assert recorded(cluster) == [1]


def test_what_is_late_is_given_up() -> None:
    deadlines = msgspec.structs.replace(SPEC.deadlines, save=2)
    cluster, owed = until_recording(msgspec.structs.replace(SPEC, save_every=0, deadlines=deadlines))
    assert cluster.give(TimePassed(now=cluster.now + 1.5)) == []
    assert cluster.give(TimePassed(now=cluster.now + 2.5))[-1] == StepRecorded(step=1, rollouts=(), num_bytes=0)
    assert said(cluster) == [
        f"samples of step 1 are missing in the record: those of rollout-{i}: no answer within 2 s" for i in range(2)
    ]
    assert say_recorded(cluster, owed) == [], "it comes too late"
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [1, 2, 3]


def test_an_interrupted_run_is_recorded_before_it_ends_and_waits_for_nobody_who_is_gone() -> None:
    cluster, owed = until_recording()
    interrupt(cluster)
    for rollout in ("rollout-0", "rollout-1"):
        lose(cluster, rollout)
    while cluster.pending:
        cluster.answer_next()
    assert cluster.tables.phase is not RunPhase.FINISHED
    given_up = cluster.give(TimePassed(now=cluster.now + 61))
    assert StepRecorded(step=1, rollouts=(), num_bytes=0) in given_up
    assert cluster.done[-1] == FinishRun(outcome="interrupted")
    assert published(cluster) == cluster.commits() == [1]

    calm, owed = until_recording()
    interrupt(calm)
    while calm.pending:
        calm.answer_next()
    assert calm.tables.phase is not RunPhase.FINISHED
    say_recorded(calm, owed)
    assert calm.done[-1] == FinishRun(outcome="interrupted")
    assert recorded(calm) == published(calm) == [1]


def test_a_run_that_fails_does_not_wait_for_its_record() -> None:
    cluster, _ = until_recording()
    while cluster.tables.step == 1:
        cluster.answer_next()
    lose(cluster, "trainer-0")
    assert isinstance(cluster.done[-1], FinishRun)
    assert cluster.done[-1].outcome == "failed"
