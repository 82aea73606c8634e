"""Checkpoints that are written while the run goes on: one at a time, whole or not at all, and waited for at the end."""

from __future__ import annotations

import msgspec
import pytest
from cluster_harness import GRPO, SFT, Cluster, answer, commands_of, interrupt, kinds, only_finish

from tandem.common.errors import DeadlineExceeded
from tandem.common.messages import AwaitCheckpoint, Failed, SaveCheckpoint
from tandem.coordinator.scheduler.events import (
    Action,
    CommandErred,
    CommitStep,
    DispatchCommand,
    FinishRun,
    ProcessJoined,
    ProcessLost,
    ProcessReplied,
    PublishCheckpoint,
    TellUser,
    TimePassed,
)
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import RunSpec

EVERY_STEP = msgspec.structs.replace(GRPO, save_every=1, validate_every=0, validate_at_start=False)
NOBODY_REPLACED = msgspec.structs.replace(EVERY_STEP, max_replacements=0)


def writing(shape: RunSpec) -> tuple[Cluster, list[DispatchCommand]]:
    """Return a cluster in its second step whose trainers still write step 1, and what they owe answers to."""
    cluster = Cluster(shape)
    cluster.join_all()
    while not commands_of(cluster, AwaitCheckpoint):
        cluster.answer_next()
    assert cluster.tables.step == 2
    return cluster, cluster.hold(AwaitCheckpoint)


def finish_writing(cluster: Cluster, owed: list[DispatchCommand]) -> list[Action]:
    """Answer what trainers owe; return what follows from the last answer."""
    actions: list[Action] = []
    for action in owed:
        actions = cluster.give(ProcessReplied(now=cluster.now, process=action.process, reply=answer(action)))
    return actions


def published(cluster: Cluster) -> list[int]:
    return [action.step for action in cluster.done if isinstance(action, PublishCheckpoint)]


@pytest.mark.parametrize("shape", [EVERY_STEP, msgspec.structs.replace(SFT, save_every=1, validate_every=0)])
def test_steps_go_on_while_a_checkpoint_is_written(shape: RunSpec) -> None:
    cluster, owed = writing(shape)
    assert cluster.commits() == [1]
    cluster.run_until(RunPhase.SAVING)  # of step 2, which has generated and trained
    assert published(cluster) == []
    assert finish_writing(cluster, owed)[0] == PublishCheckpoint(step=1)
    cluster.run_until(RunPhase.FINISHED)
    assert published(cluster) == cluster.commits() == [1, 2, 3]


def test_a_second_checkpoint_waits_for_the_first() -> None:
    cluster, owed = writing(EVERY_STEP)
    cluster.run_until(RunPhase.SAVING)
    while cluster.pending:  # the digests of version 2
        cluster.answer_next()
    assert [command.step for command in commands_of(cluster, SaveCheckpoint)] == [1, 1]
    assert cluster.give(TimePassed(now=cluster.now + 1)) == []
    publish, *copies = finish_writing(cluster, owed)
    assert publish == PublishCheckpoint(step=1)
    assert [type(copy.command) for copy in copies if isinstance(copy, DispatchCommand)] == [SaveCheckpoint] * 2
    assert {copy.command.folder for copy in copies} == {"ck/2"}  # type: ignore[union-attr]


def test_the_run_ends_when_its_last_checkpoint_is_written() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.WRITING)
    assert cluster.commits() == [0, 1, 2, 3]
    last = cluster.hold(AwaitCheckpoint)
    assert not cluster.pending
    assert finish_writing(cluster, last) == [PublishCheckpoint(step=3), FinishRun(outcome="finished")]


@pytest.mark.parametrize("phase", [RunPhase.GENERATING, RunPhase.TRAINING, RunPhase.REFITTING, RunPhase.SAVING])
def test_ctrl_c_waits_for_the_checkpoint(phase: RunPhase) -> None:
    cluster, owed = writing(EVERY_STEP)
    cluster.run_until(phase)
    if phase is RunPhase.GENERATING:
        cluster.pending.clear()  # abandoned
    interrupt(cluster)
    while cluster.pending:
        cluster.answer_next()
    assert cluster.tables.phase in (RunPhase.SAVING, RunPhase.WRITING)
    finish_writing(cluster, owed)
    cluster.run_until(RunPhase.FINISHED)
    expected = [1] if phase is RunPhase.GENERATING else [1, 2]
    assert published(cluster) == cluster.commits() == expected
    assert cluster.done[-1] == FinishRun(outcome="interrupted")


def test_ctrl_c_twice_waits_for_nothing() -> None:
    cluster, _ = writing(EVERY_STEP)
    interrupt(cluster)
    assert only_finish(interrupt(cluster)).outcome == "interrupted"


def test_writing_has_a_deadline() -> None:
    cluster, owed = writing(EVERY_STEP)
    started = cluster.now
    cluster.run_until(RunPhase.SAVING)
    while cluster.pending:
        cluster.answer_next()
    finish_writing(cluster, owed[:1])
    assert cluster.give(TimePassed(now=started + 59.5)) == []
    finish = only_finish(cluster.give(TimePassed(now=started + 60.5)))
    assert isinstance(finish.error, DeadlineExceeded)
    assert str(finish.error) == "trainer-1 failed while writing a checkpoint: no answer within 60 s"
    assert published(cluster) == []


def test_a_part_that_cannot_be_written_ends_the_run_in_its_own_words() -> None:
    cluster, owed = writing(EVERY_STEP)
    finish_writing(cluster, owed[:1])
    failed = Failed(
        command_id=owed[1].command.command_id,
        phase="writing step 1",
        error="cannot write ck/1/optimizer: No space left on device",
        expected=True,
    )
    finish = only_finish(cluster.give(CommandErred(now=cluster.now, process="trainer-1", failed=failed)))
    assert str(finish.error) == (
        "trainer-1 failed while writing step 1: cannot write ck/1/optimizer: No space left on device"
    )
    assert published(cluster) == []


def lose(cluster: Cluster, process: str) -> list[Action]:
    return cluster.give(ProcessLost(now=cluster.now, process=process, reason="killed by SIGKILL"))


def test_a_trainer_that_dies_takes_the_checkpoint_along() -> None:
    cluster, _ = writing(EVERY_STEP)
    assert str(only_finish(lose(cluster, "trainer-1")).error) == (
        "trainer-1 failed while generating: killed by SIGKILL"
    )
    assert published(cluster) == []


def test_a_run_that_fails_for_another_reason_waits_for_the_checkpoint() -> None:
    cluster, owed = writing(NOBODY_REPLACED)
    why = "refit-0 failed while generating: killed by SIGKILL"
    assert lose(cluster, "refit-0") == [TellUser(text=f"{why}; the run ends as soon as its last checkpoint is written")]
    assert cluster.tables.phase is RunPhase.WRITING
    before = kinds(cluster)
    for process in ("rollout-1", "refit-0"):
        assert lose(cluster, process) == []
    assert cluster.give(ProcessJoined(now=cluster.now, process="rollout-1", kind="rollout")) == []
    for action in cluster.pending:  # of the step, which is given up
        assert cluster.give(ProcessReplied(now=cluster.now, process=action.process, reply=answer(action))) == []
    assert kinds(cluster) == before
    publish, finish = finish_writing(cluster, owed)
    assert publish == PublishCheckpoint(step=1)
    assert str(only_finish([finish]).error) == why
    assert not any(isinstance(a, CommitStep) and a.step > 1 for a in cluster.done)


def test_a_trainer_that_dies_after_it_has_written_its_part_leaves_the_checkpoint_whole() -> None:
    cluster, owed = writing(EVERY_STEP)
    finish_writing(cluster, owed[:1])
    assert [type(action) for action in lose(cluster, "trainer-0")] == [TellUser]
    publish, finish = finish_writing(cluster, owed[1:])
    assert publish == PublishCheckpoint(step=1)
    assert str(only_finish([finish]).error) == "trainer-0 failed while generating: killed by SIGKILL"


@pytest.mark.parametrize("end", ["Ctrl-C", "the other trainer dies", "the deadline"])
def test_a_run_that_has_failed_waits_no_longer_than_makes_sense(end: str) -> None:
    cluster, _ = writing(NOBODY_REPLACED)
    lose(cluster, "refit-0")
    match end:
        case "Ctrl-C":
            actions = interrupt(cluster)
        case "the other trainer dies":
            actions = lose(cluster, "trainer-1")
        case _:
            actions = cluster.give(TimePassed(now=cluster.now + 61))
    assert str(only_finish(actions).error) == "refit-0 failed while generating: killed by SIGKILL"
    assert published(cluster) == []
