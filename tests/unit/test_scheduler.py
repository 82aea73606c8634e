"""The coordinator's decisions: events in, actions out, no sockets."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest
from cluster_harness import (
    GRPO,
    SFT,
    Cluster,
    SentBatch,
    answer,
    commands_of,
    interrupt,
    kinds,
    lose,
    only_finish,
    replace,
)

from tandem.common.errors import CommandFailed, DeadlineExceeded, ServiceLost
from tandem.common.messages import (
    AwaitCheckpoint,
    BuildEngine,
    BuildTrainer,
    CommitVersion,
    ConnectTransferGroup,
    DigestsReported,
    EngineBuilt,
    Failed,
    InstallProgram,
    PlannedTransferGroup,
    PlanTransfers,
    Refit,
    Refitted,
    Reply,
    ReportDigests,
    SampleScored,
    SamplesMissing,
    SaveCheckpoint,
    TransfersPlanned,
    VersionCommitted,
)
from tandem.coordinator.scheduler.events import (
    Action,
    CommandErred,
    CommitStep,
    DiscardSamples,
    DispatchCommand,
    DispatchPrompts,
    DrawPrompts,
    FinishRun,
    GroupSize,
    ProcessJoined,
    ProcessLost,
    ProcessReplied,
    PublishCheckpoint,
    RecordRefit,
    ReplaceEngine,
    StopRequested,
    TellUser,
    TimePassed,
)
from tandem.coordinator.scheduler.requests import PendingRequests, RunPhase
from tests.harness.members import at


def test_a_whole_grpo_run_in_order() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    generate, commit = "DispatchPrompts:train:{0} ×2", "CommitVersion ×1"
    train, refit, verify = "SentBatch:train:{0} ×2", "Refit ×2", "ReportDigests ×4"
    validate, save = "DispatchPrompts:validate:{0} ×2", ["SaveCheckpoint ×2", "AwaitCheckpoint ×2"]
    expected = ["OpenRendezvous ×1", "BuildEngine ×2", "BuildTrainer ×2", "PlanTransfers ×1", "InstallProgram ×4"]
    expected += [refit, verify, validate.format(0), commit]
    expected += [generate.format(1), train.format(1), refit]
    expected += [verify, generate.format(2), commit, train.format(2), refit]
    expected += [verify, validate.format(2), commit, *save, generate.format(3), train.format(3), refit]
    expected += [verify, validate.format(3), commit, *save]
    assert kinds(cluster) == expected
    assert cluster.commits() == [0, 1, 2, 3]
    assert cluster.done[-1] == FinishRun(outcome="finished")
    published = [i for i, a in enumerate(cluster.done) if isinstance(a, PublishCheckpoint)]
    before = [[a.step for a in cluster.done[:i] if isinstance(a, CommitStep)][-1] for i in published]
    assert before == [cluster.done[i].step for i in published] == [2, 3], "only a step that is done has a checkpoint"


def test_trainers_are_built_after_engines_that_measure_memory() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, engines_first=True))
    cluster.join_all()
    assert kinds(cluster) == ["BuildEngine ×2"]
    cluster.run_until(RunPhase.FINISHED)
    assert kinds(cluster)[:4] == ["BuildEngine ×2", "OpenRendezvous ×1", "BuildTrainer ×2", "PlanTransfers ×1"]
    assert cluster.done[-1] == FinishRun(outcome="finished")


def test_an_engine_that_measures_memory_is_built_again_while_no_trainer_works() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, engines_first=True))
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    since = len(cluster.commands)
    lose(cluster, "rollout-0")
    replace(cluster, "rollout-0")
    assert commands_to(cluster, "rollout-0", since) == [], "both trainers train"
    cluster.answer_next()
    assert commands_to(cluster, "rollout-0", since) == [], "one of them still does"
    cluster.answer_next()
    assert commands_to(cluster, "rollout-0", since) == ["BuildEngine"]
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]


def test_trainers_wait_while_an_engine_that_measures_memory_is_built_again() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, engines_first=True))
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    cluster.answer_next()
    cluster.answer_next()
    assert cluster.tables.phase is RunPhase.TRAINING


def test_layouts_and_programs_reach_the_right_processes() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.REFITTING)
    (planning,) = commands_of(cluster, PlanTransfers)
    assert planning.sources == {"trainer-0": b"trainer-0 holds", "trainer-1": b"trainer-1 holds"}
    assert planning.destinations == {"rollout-0": b"rollout-0 wants", "rollout-1": b"rollout-1 wants"}
    installs = {
        a.process: a.command.programs
        for a in cluster.commands
        if isinstance(a, DispatchCommand) and isinstance(a.command, InstallProgram)
    }
    assert installs == {m: (f"program of {m}".encode(),) for m in ("trainer-0", "trainer-1", "rollout-0", "rollout-1")}


def test_trainers_that_do_not_hold_the_policy_train_and_save_and_have_no_weights_for_engines() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, without_policy=frozenset({"trainer-1"})))
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    (planning,) = commands_of(cluster, PlanTransfers)
    assert planning.sources == {"trainer-0": b"trainer-0 holds"}
    dispatched = [
        type(a.command) for a in cluster.commands if isinstance(a, DispatchCommand) and a.process == "trainer-1"
    ]
    assert {*dispatched} == {BuildTrainer, SaveCheckpoint, AwaitCheckpoint}
    trained = [a.step for a in cluster.commands if isinstance(a, SentBatch) and a.process == "trainer-1"]
    assert trained == [1, 2, 3]
    assert {*commands_of(cluster, CommitVersion)[1].digests} == {"trainer-0", "rollout-0", "rollout-1"}


def test_a_version_is_committed_with_every_digest() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    commits = commands_of(cluster, CommitVersion)
    assert [c.version for c in commits] == [0, 1, 2, 3]
    processes = ("trainer-0", "trainer-1", "rollout-0", "rollout-1")
    assert commits[1].digests == {process: f"{process} at 1".encode() for process in processes}
    assert [c.has_update for c in commits] == [False, True, True, True]
    records = [a for a in cluster.done if isinstance(a, RecordRefit)]
    assert [r.version for r in records] == [0, 1, 2, 3]
    assert records[1].engines == ("rollout-0", "rollout-1")
    assert (records[1].digest, records[1].predicted_s, records[1].bound_s) == (9, 0.5, 0.25)
    assert set(records[1].seconds) == {"transfer", "verify", "commit"}


def test_no_sample_is_trained_on_before_its_version_is_verified() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    cluster.run_until(RunPhase.GENERATING)
    reports = [a for a in cluster.pending if isinstance(a, DispatchCommand)]
    assert {a.process for a in reports} == {"trainer-0", "trainer-1", "rollout-0", "rollout-1"}
    cluster.pending = [a for a in cluster.pending if isinstance(a, DispatchPrompts)]
    for _ in range(2):
        cluster.answer_next()  # every sample is here
    assert cluster.tables.phase is RunPhase.GENERATING
    cluster.pending = list(reports)
    for _ in range(4):
        cluster.answer_next()
    assert cluster.tables.phase is RunPhase.GENERATING
    cluster.answer_next()  # the commit
    assert cluster.tables.phase is RunPhase.TRAINING


def test_without_verification_a_version_is_committed_without_digests() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, is_verified=False))
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    assert commands_of(cluster, ReportDigests) == []
    assert [(c.version, c.digests) for c in commands_of(cluster, CommitVersion)] == [(0, {}), (1, {}), (2, {}), (3, {})]


def test_the_last_version_is_verified_even_if_nothing_follows() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, validate_every=0, save_every=0))
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    assert [c.version for c in commands_of(cluster, CommitVersion)] == [0, 1, 2, 3]
    assert cluster.commits() == [0, 1, 2, 3]
    assert isinstance(cluster.done[-2], RecordRefit)
    assert cluster.done[-1] == FinishRun(outcome="finished")


def test_every_group_goes_to_one_engine() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    hands = {a.process: a.groups for a in cluster.commands if isinstance(a, DispatchPrompts) and a.purpose == "train"}
    assert hands == {"rollout-0": (0, 2, 4), "rollout-1": (1, 3)}


def test_nothing_starts_before_everyone_is_here() -> None:
    cluster = Cluster(GRPO)
    for process in ("rollout-1", "refit-0", "trainer-1", "rollout-0"):
        assert cluster.give(ProcessJoined(now=0.0, process=process, kind=process.split("-")[0])) == []
    assert cluster.give(ProcessJoined(now=0.0, process="trainer-0", kind="trainer"))


def test_an_sft_run_has_no_engines() -> None:
    cluster = Cluster(SFT)
    cluster.join_all()
    assert cluster.give(TimePassed(now=cluster.now + 0.1)) == [], "and none that is missed"
    cluster.run_until(RunPhase.FINISHED)
    assert kinds(cluster) == [
        "OpenRendezvous ×1",
        "BuildTrainer ×1",
        "SentBatch:train:1 ×1",
        "SentBatch:train:2 ×1",
        "SentBatch:validate:2 ×1",
        "SaveCheckpoint ×1",
        "AwaitCheckpoint ×1",
        "SentBatch:train:3 ×1",
        "SentBatch:validate:3 ×1",
        "SaveCheckpoint ×1",
        "AwaitCheckpoint ×1",
    ]
    assert cluster.commits() == [1, 2, 3]


def test_the_last_step_may_be_the_only_one_that_is_validated() -> None:
    for at_end, expected in ((True, ["DispatchPrompts:validate:3 ×2"]), (False, [])):
        cluster = Cluster(
            msgspec.structs.replace(GRPO, validate_every=0, validate_at_start=False, validate_at_end=at_end)
        )
        cluster.join_all()
        cluster.run_until(RunPhase.FINISHED)
        assert [kind for kind in kinds(cluster) if ":validate:" in kind] == expected


def test_a_resumed_run_begins_after_its_checkpoint() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, first_step=3, resume_from="ck/step_2"))
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    assert {b.checkpoint for b in commands_of(cluster, BuildTrainer)} == {"ck/step_2"}
    assert [refit.version for refit in commands_of(cluster, Refit)] == [2, 2, 3, 3]
    assert cluster.commits() == [3]


@pytest.mark.parametrize("validate_at_start", [True, False])
def test_seconds_by_phase_add_up(validate_at_start: bool) -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, validate_at_start=validate_at_start))
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    for commit in (a for a in cluster.done if isinstance(a, CommitStep)):
        parts = {name: s for name, s in commit.seconds.items() if name != "total"}
        assert sum(parts.values()) == pytest.approx(commit.seconds["total"])
        assert parts.get("refit", 0.0) == (2.0 if commit.step else 0.0)  # the first refit is no step's
        if commit.step > (0 if validate_at_start else 1):
            # Beside the second step's generation, five commands verify version 1; beside the third's, two save step 2.
            assert parts["generation"] == {1: 2.0, 2: 7.0, 3: 4.0}[commit.step]


# --- failure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", ["trainer-1", "refit-0"])
def test_a_lost_process_ends_the_run_and_is_named(process: str) -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, max_replacements=0))
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    finish = only_finish(cluster.give(ProcessLost(now=cluster.now, process=process, reason="killed by SIGKILL")))
    assert isinstance(finish.error, ServiceLost)
    assert str(finish.error) == f"{process} failed while generating: killed by SIGKILL"
    assert cluster.plan.handle(TimePassed(now=1e9)) == []


def test_an_engine_that_is_lost_before_the_first_refit_ends_the_run() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.INSTALLING)
    finish = only_finish(cluster.give(ProcessLost(now=cluster.now, process="rollout-1", reason="gone")))
    assert str(finish.error) == "rollout-1 failed while installing transfer programs: gone"


def test_a_failed_command_ends_the_run_with_the_processes_own_words() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    command_id = cluster.pending[0].command_id  # type: ignore[union-attr]
    failed = Failed(command_id=command_id, phase="training step 1", error="the reward is NaN", expected=True)
    finish = only_finish(cluster.give(CommandErred(now=cluster.now, process="trainer-0", failed=failed)))
    assert isinstance(finish.error, CommandFailed)
    assert str(finish.error) == "trainer-0 failed while training step 1: the reward is NaN"


@pytest.mark.parametrize(
    ("phase", "allowed", "doing"),
    [
        (RunPhase.BUILDING, 20, "building"),
        (RunPhase.REFITTING, 5, "refitting"),
        (RunPhase.GENERATING, 30, "generating"),
        (RunPhase.TRAINING, 40, "training"),
        (RunPhase.SAVING, 60, "saving a checkpoint"),
    ],
)
def test_every_phase_has_a_deadline(phase: RunPhase, allowed: float, doing: str) -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, max_replacements=0))
    cluster.join_all()
    cluster.run_until(phase)
    assert cluster.give(TimePassed(now=cluster.now + allowed - 0.5)) == []
    finish = only_finish(cluster.give(TimePassed(now=cluster.now + allowed + 0.5)))
    assert isinstance(finish.error, DeadlineExceeded)
    assert finish.error.phase == doing
    assert f"no answer within {allowed:g} s" in str(finish.error)


def test_joining_has_a_deadline_that_names_who_is_missing() -> None:
    cluster = Cluster(GRPO)
    cluster.give(ProcessJoined(now=0.0, process="trainer-0", kind="trainer"))
    finish = only_finish(cluster.give(TimePassed(now=11.0)))
    assert "1 trainer and 2 rollout and 1 refit did not join within 10 s" in str(finish.error)


def test_an_answer_that_comes_twice_counts_once() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    first = cluster.pending.pop(0)
    reply = ProcessReplied(now=cluster.now, process=first.process, reply=answer(first))
    assert cluster.give(reply) == []
    assert cluster.give(reply) == []  # the other rank is still training
    assert cluster.tables.phase is RunPhase.TRAINING


# --- engines that are lost, invalidated or wrong ---------------------------------------------------------------------


def commands_to(cluster: Cluster, process: str, since: int) -> list[str]:
    named = [
        type(a.command).__name__ if isinstance(a, DispatchCommand) else type(a).__name__
        for a in cluster.commands[since:]
        if a.process == process
    ]
    return named


def test_an_engine_lost_while_generating_is_replaced_and_its_groups_are_generated_again() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    cluster.run_until(RunPhase.GENERATING)
    since = len(cluster.commands)
    actions = lose(cluster, "rollout-1")
    assert actions == [
        ReplaceEngine(process="rollout-1", reason="killed by SIGKILL"),
        DiscardSamples(step=2, purpose="train", groups=(1, 3)),
    ]
    while cluster.pending:
        cluster.answer_next()
    assert cluster.tables.phase is RunPhase.GENERATING  # the others are done
    replace(cluster, "rollout-1")
    cluster.run_until(RunPhase.TRAINING)
    assert commands_to(cluster, "rollout-1", since) == [
        "BuildEngine", "InstallProgram", "Refit", "ReportDigests", "DispatchPrompts"
    ]  # fmt: skip
    assert commands_to(cluster, "rollout-0", since) == []
    assert commands_to(cluster, "trainer-0", since) == ["SentBatch"]
    again = [a for a in cluster.commands[since:] if isinstance(a, DispatchPrompts)]
    assert [(a.process, a.groups) for a in again] == [("rollout-1", (1, 3))]
    (refit,) = (
        a.command for a in cluster.commands[since:] if isinstance(a, DispatchCommand) and isinstance(a.command, Refit)
    )
    assert (refit.version, refit.only) == (1, ("rollout-1",))
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]


def test_an_engine_lost_while_training_joins_the_next_refit() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    assert lose(cluster, "rollout-0") == [ReplaceEngine(process="rollout-0", reason="killed by SIGKILL")]
    replace(cluster, "rollout-0")
    cluster.run_until(RunPhase.REFITTING)
    cluster.run_until(RunPhase.GENERATING)
    refits = [(r.version, r.only) for r in commands_of(cluster, Refit)]
    assert refits[2:] == [(1, ()), (1, ())]


def test_an_engine_lost_while_refitting_gets_the_version_alone() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    cluster.run_until(RunPhase.REFITTING)
    lose(cluster, "rollout-0")
    cluster.answer_next()  # the other engine
    assert cluster.tables.phase is RunPhase.REFITTING
    replace(cluster, "rollout-0")
    cluster.run_until(RunPhase.GENERATING)
    assert [(r.version, r.only) for r in commands_of(cluster, Refit)][-1] == (1, ("rollout-0",))
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]


def test_an_engine_that_is_lost_too_often_ends_the_run() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    lose(cluster, "rollout-0")
    replace(cluster, "rollout-0")
    twice = copy.deepcopy(cluster)
    finish = only_finish(lose(cluster, "rollout-0"))
    times = "processes were replaced 1 times before"
    assert str(finish.error) == f"rollout-0 failed while generating: killed by SIGKILL; {times}"
    assert str(only_finish(lose(twice, "rollout-1")).error).endswith(times), "one loss of each engine counts twice"


def test_a_lost_refit_service_is_told_the_layouts_and_goes_on() -> None:
    patient = msgspec.structs.replace(GRPO.deadlines, join=100)
    cluster = Cluster(msgspec.structs.replace(GRPO, deadlines=patient))
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    since = len(cluster.commands)
    assert lose(cluster, "refit-0") == [ReplaceEngine(process="refit-0", reason="killed by SIGKILL")]
    while cluster.pending:  # all but the comparison goes on
        cluster.answer_next()
    assert cluster.commits() == [0, 1], "what is not proven is not trained on"
    for seconds in (1, 20):
        assert cluster.give(TimePassed(now=cluster.now + seconds)) == [], "it is waited for"
    (again,) = cluster.give(ProcessJoined(now=cluster.now, process="refit-0", kind="refit"))
    assert isinstance(again, DispatchCommand)
    (first, second) = commands_of(cluster, PlanTransfers)
    assert (first.sources, first.destinations) == (second.sources, second.destinations)
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]
    later = {type(action.command) for action in cluster.commands[since:] if isinstance(action, DispatchCommand)}
    assert not later & {BuildTrainer, BuildEngine, InstallProgram}, "nobody else begins anew"
    assert {action.version for action in cluster.done if isinstance(action, RecordRefit)} == {0, 1, 2, 3}


@pytest.mark.parametrize("is_comparing", [True, False])
def test_the_next_refit_service_proves_what_the_lost_one_compared_or_had_proven(*, is_comparing: bool) -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    while not commands_of(cluster, CommitVersion):
        cluster.answer_next()
    while not is_comparing and cluster.tables.weights.verification.is_going_on:
        cluster.answer_next()
    lose(cluster, "refit-0")
    cluster.give(ProcessJoined(now=cluster.now, process="refit-0", kind="refit"))
    cluster.run_until(RunPhase.FINISHED)
    assert [command.version for command in commands_of(cluster, CommitVersion)] == [0, 0, 1, 2, 3]
    recorded = [action.version for action in cluster.done if isinstance(action, RecordRefit)]
    assert recorded == ([0, 1, 2, 3] if is_comparing else [0, 0, 1, 2, 3])
    assert cluster.commits() == [0, 1, 2, 3]


def test_a_refit_service_that_nobody_replaces_ends_the_run() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    lose(cluster, "refit-0")
    finish = only_finish(cluster.give(TimePassed(now=cluster.now + 10.5)))
    assert str(finish.error) == (
        "refit-0 failed while waiting for a replacement: no process has taken its place within 10 s"
    )


@pytest.mark.parametrize("phase", [RunPhase.GENERATING, RunPhase.REFITTING])
def test_an_engine_that_does_not_answer_is_replaced_like_one_that_is_lost(phase: RunPhase) -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(phase)
    while len(cluster.pending) > 1:
        cluster.answer_next()
    (late,) = cluster.pending
    actions = cluster.give(TimePassed(now=cluster.now + (30.5 if phase is RunPhase.GENERATING else 5.5)))
    (replaced,) = [action for action in actions if isinstance(action, ReplaceEngine)]
    assert replaced.process == late.process
    assert replaced.reason.startswith("no answer within")


def test_a_replacement_of_the_only_engine_that_does_not_come_ends_the_run() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, expected={**GRPO.expected, "rollout": 1}))
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    lose(cluster, "rollout-0")
    while cluster.pending:
        cluster.answer_next()
    finish = only_finish(cluster.give(TimePassed(now=cluster.now + 10.5)))
    assert str(finish.error) == (
        "rollout-0 failed while waiting for a replacement: no process has taken its place within 10 s"
    )


def test_a_replacement_that_wants_something_else_ends_the_run() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    lose(cluster, "rollout-0")
    replace(cluster, "rollout-0")
    (build,) = (a for a in cluster.pending if isinstance(a, DispatchCommand) and isinstance(a.command, BuildEngine))
    reply = EngineBuilt(
        command_id=build.command.command_id, layouts=(b"something else",), samples_at=at("tcp://10.0.0.1:1")
    )
    finish = only_finish(cluster.give(ProcessReplied(now=cluster.now, process="rollout-0", reply=reply)))
    assert "wants other weights" in str(finish.error)


def in_two_parts(reply: Reply) -> Reply:
    """Let both engines answer for two workers."""
    match reply:
        case EngineBuilt(layouts=(layout,)):
            return msgspec.structs.replace(reply, layouts=(layout + b" 0", layout + b" 1"))
        case TransfersPlanned():
            parts = [f"rollout-{engine}/{worker}" for engine in range(2) for worker in range(2)]
            programs = {part: f"program of {part}".encode() for part in ("trainer-0", "trainer-1", *parts)}
            return msgspec.structs.replace(reply, programs=programs)
        case DigestsReported(digests=(digest,)) if digest.startswith(b"rollout"):
            return msgspec.structs.replace(reply, digests=(digest + b" 0", digest + b" 1"))
        case other:
            return other


def test_the_workers_of_an_engine_are_planned_for_and_verified_one_by_one_and_asked_together() -> None:
    cluster = Cluster(GRPO)
    cluster.adjust = in_two_parts
    cluster.join_all()
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]
    (planning,) = commands_of(cluster, PlanTransfers)
    workers = [(engine, worker) for engine in range(2) for worker in range(2)]
    assert planning.destinations == {f"rollout-{e}/{w}": f"rollout-{e} wants {w}".encode() for e, w in workers}
    assert planning.sources.keys() == {"trainer-0", "trainer-1"}
    installs = [
        (a.process, a.command.programs)
        for a in cluster.commands
        if isinstance(a, DispatchCommand) and isinstance(a.command, InstallProgram)
    ]
    assert installs == [
        ("trainer-0", (b"program of trainer-0",)),
        ("trainer-1", (b"program of trainer-1",)),
        ("rollout-0", (b"program of rollout-0/0", b"program of rollout-0/1")),
        ("rollout-1", (b"program of rollout-1/0", b"program of rollout-1/1")),
    ]
    first = commands_of(cluster, CommitVersion)[0]
    assert first.digests == {
        **{f"trainer-{rank}": f"trainer-{rank} at 0".encode() for rank in range(2)},
        **{f"rollout-{e}/{w}": f"rollout-{e} at 0 {w}".encode() for e, w in workers},
    }


def test_a_replacement_with_other_workers_ends_the_run() -> None:
    cluster = Cluster(GRPO)
    cluster.adjust = in_two_parts
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    lose(cluster, "rollout-0")
    replace(cluster, "rollout-0")
    (build,) = (a for a in cluster.pending if isinstance(a, DispatchCommand) and isinstance(a.command, BuildEngine))
    reply = EngineBuilt(
        command_id=build.command.command_id, layouts=(b"rollout-0 wants 0",), samples_at=at("tcp://10.0.0.1:1")
    )
    finish = only_finish(cluster.give(ProcessReplied(now=cluster.now, process="rollout-0", reply=reply)))
    assert "wants other weights" in str(finish.error)


def test_an_engine_that_differs_is_quarantined_refitted_and_asked_again() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    cluster.run_until(RunPhase.GENERATING)
    since = len(cluster.commands)
    assert differ(cluster, "rollout-1", "q_proj differs")[0] == DiscardSamples(step=2, purpose="train", groups=(1, 3))
    cluster.run_until(RunPhase.TRAINING)
    assert commands_to(cluster, "rollout-1", since)[-3:] == ["Refit", "ReportDigests", "DispatchPrompts"]
    record = [a for a in cluster.done if isinstance(a, RecordRefit)][-1]
    assert record.quarantined == {"rollout-1": "it does not hold version 1: q_proj differs"}
    assert record.engines == ("rollout-0", "rollout-1")


def test_what_never_changes_goes_once_to_each_engine_and_again_to_one_that_is_partial_or_new() -> None:
    cluster = Cluster(GRPO)
    frozen, both = {"trainer-0>rollout-0": 7, "trainer-0>rollout-1": 7}, ("rollout-0", "rollout-1")

    def plan_with_frozen(action: DispatchCommand) -> TransfersPlanned:
        reply = answer(action)
        assert isinstance(reply, TransfersPlanned)
        return msgspec.structs.replace(reply, num_bytes_frozen=frozen)

    cluster.join_all()
    while not isinstance(cluster.pending[0], DispatchCommand) or not isinstance(
        cluster.pending[0].command, PlanTransfers
    ):
        cluster.answer_next()
    planning = cluster.pending.pop(0)
    assert isinstance(planning, DispatchCommand)
    cluster.give(ProcessReplied(now=cluster.now, process="refit-0", reply=plan_with_frozen(planning)))
    cluster.run_until(RunPhase.TRAINING)
    assert [(command.version, command.joining_engines) for command in commands_of(cluster, Refit)] == [(0, both)] * 2
    cluster.run_until(RunPhase.GENERATING)
    since = len(commands_of(cluster, Refit))
    differ(cluster, "rollout-1", "q_proj differs")
    cluster.run_until(RunPhase.TRAINING)
    of_version = [(command.version, command.joining_engines) for command in commands_of(cluster, Refit)[2:]]
    assert of_version == [(1, ()), (1, ()), (1, ("rollout-1",))]
    assert since == 4
    lose(cluster, "rollout-0")
    replace(cluster, "rollout-0")
    cluster.run_until(RunPhase.GENERATING)
    assert {command.joining_engines for command in commands_of(cluster, Refit)[5:]} == {("rollout-0",)}


def test_engines_without_a_verified_version_are_named_to_senders_of_differences() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, sends_differences=True))
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    cluster.run_until(RunPhase.GENERATING)
    differ(cluster, "rollout-1", "q_proj differs")
    cluster.run_until(RunPhase.TRAINING)
    both = ("rollout-0", "rollout-1")
    told = [(command.version, command.whole) for command in commands_of(cluster, Refit)]
    assert told == [(0, both), (0, both), (1, ()), (1, ()), (1, ("rollout-1",))]
    lose(cluster, "rollout-0")
    replace(cluster, "rollout-0")
    cluster.run_until(RunPhase.GENERATING)
    later = {(command.version, command.whole) for command in commands_of(cluster, Refit)[len(told) :]}
    assert later == {(2, ("rollout-0",))}, "the other one holds version 1"


def differ(cluster: Cluster, engine: str, what: str) -> list[Action]:
    """Answer until the version is to be committed; answer that with an engine that differs; return the actions."""
    for _ in range(100):
        action = cluster.pending[0]
        if isinstance(action, DispatchCommand) and isinstance(action.command, CommitVersion):
            cluster.pending.pop(0)
            reply = VersionCommitted(
                command_id=action.command.command_id, version=action.command.version, differing={engine: what}, digest=9
            )
            return sorted(
                cluster.give(ProcessReplied(now=cluster.now, process="refit-0", reply=reply)),
                key=lambda a: not isinstance(a, DiscardSamples),
            )
        cluster.answer_next()
    raise AssertionError("no version was committed")


def test_an_engine_that_differs_twice_ends_the_run() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    differ(cluster, "rollout-1", "q_proj differs")
    finish = only_finish(differ(cluster, "rollout-1", "q_proj still differs"))
    assert str(finish.error) == (
        "rollout-1 failed while verifying a weight version: it does not hold version 1: q_proj still differs"
    )


def fail_refit(cluster: Cluster) -> list[Action]:
    action = cluster.pending.pop(0)
    assert isinstance(action, DispatchCommand)
    assert isinstance(action.command, Refit)
    failed = Failed(command_id=action.command.command_id, phase="refitting", error="the memory is gone", expected=True)
    return cluster.give(CommandErred(now=cluster.now, process=action.process, failed=failed))


def test_an_invalidated_engine_is_refitted_once_more_before_the_run_fails() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.REFITTING)
    (again,) = fail_refit(cluster)
    assert isinstance(again, DispatchCommand)
    assert (again.process, again.command.only) == ("rollout-0", ("rollout-0",))  # type: ignore[union-attr]
    cluster.answer_next()  # the other engine
    assert cluster.tables.phase is RunPhase.REFITTING
    finish = only_finish(fail_refit(cluster))
    assert str(finish.error) == "rollout-0 failed while refitting: the memory is gone"


def test_a_replaced_engine_is_connected_again_with_those_it_streams_with() -> None:
    cluster = Cluster(GRPO)
    transfer_group = PlannedTransferGroup(name="to rollout-1", members=("trainer-0", "rollout-1"))
    cluster.adjust = lambda reply: (
        msgspec.structs.replace(reply, transfer_groups=(transfer_group,), senders=("trainer-0",))
        if isinstance(reply, TransfersPlanned)
        else reply
    )
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    connects = commands_of(cluster, ConnectTransferGroup)
    assert [(c.epoch, c.rendezvous_host, c.rendezvous_port) for c in connects] == [(0, "127.0.0.1", 1234)] * 2
    since = len(cluster.commands)
    lose(cluster, "rollout-1")
    replace(cluster, "rollout-1")
    cluster.run_until(RunPhase.TRAINING)
    assert [c.epoch for c in commands_of(cluster, ConnectTransferGroup)[2:]] == [1, 1]
    assert commands_to(cluster, "trainer-0", since)[:2] == ["ConnectTransferGroup", "Refit"]
    assert commands_to(cluster, "rollout-0", since) == []


def with_mesh(*processes: str) -> Callable[[Reply], Reply]:
    """Have one mesh planned, in which `trainer-0` and every engine send."""
    transfer_group = PlannedTransferGroup(name="the mesh", members=processes)
    senders = ("trainer-0", *(process for process in processes if process.startswith("rollout")))

    def adjust(reply: Reply) -> Reply:
        if not isinstance(reply, TransfersPlanned):
            return reply
        return msgspec.structs.replace(reply, transfer_groups=(transfer_group,), senders=senders)

    return adjust


def test_engines_that_pass_weights_on_are_refitted_together() -> None:
    """One that is invalidated has nothing to pass on: they are connected once, and served by one command."""
    cluster = Cluster(GRPO)
    cluster.adjust = with_mesh("trainer-0", "rollout-0", "rollout-1")
    cluster.join_all()
    cluster.run_until(RunPhase.REFITTING)
    cluster.pending.sort(key=lambda action: action.process)  # both engines before the trainer
    assert fail_refit(cluster) == []
    connects = fail_refit(cluster)
    assert [(a.process, type(a.command)) for a in connects if isinstance(a, DispatchCommand)] == [
        (process, ConnectTransferGroup) for process in ("trainer-0", "rollout-0", "rollout-1")
    ]
    cluster.run_until(RunPhase.GENERATING)
    again = [
        (a.process, a.command.only)
        for a in cluster.commands
        if isinstance(a, DispatchCommand) and isinstance(a.command, Refit)
    ]
    assert again[3:] == [(process, ("rollout-0", "rollout-1")) for process in ("trainer-0", "rollout-0", "rollout-1")]
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1, 2, 3]


def test_a_mesh_is_not_connected_with_a_member_that_is_gone() -> None:
    cluster = Cluster(GRPO)
    cluster.adjust = with_mesh("trainer-0", "rollout-0", "rollout-1")
    cluster.join_all()
    cluster.run_until(RunPhase.REFITTING)
    since = len(cluster.commands)
    lose(cluster, "rollout-1")
    cluster.pending.sort(key=lambda action: action.process)
    assert fail_refit(cluster) == [], "the one that is invalidated waits for the one that is gone"
    replace(cluster, "rollout-1")
    cluster.run_until(RunPhase.GENERATING)
    assert commands_to(cluster, "rollout-0", since)[:2] == ["ConnectTransferGroup", "Refit"]
    assert commands_to(cluster, "rollout-1", since)[:4] == [
        "BuildEngine",
        "InstallProgram",
        "ConnectTransferGroup",
        "Refit",
    ]


def test_an_engine_that_fails_while_it_passes_weights_on_is_not_to_blame() -> None:
    cluster = Cluster(GRPO)
    cluster.adjust = with_mesh("trainer-0", "rollout-0", "rollout-1")
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    lose(cluster, "rollout-1")
    replace(cluster, "rollout-1")
    for _ in range(100):
        if isinstance(cluster.pending[0], DispatchCommand) and isinstance(cluster.pending[0].command, Refit):
            break
        cluster.answer_next()
    cluster.pending.sort(key=lambda action: action.process)
    assert cluster.pending[0].process == "rollout-0"
    assert fail_refit(cluster) == []
    cluster.run_until(RunPhase.FINISHED)
    records = [a for a in cluster.done if isinstance(a, RecordRefit)]
    assert all(record.quarantined == {} for record in records)


@pytest.mark.parametrize(
    ("sends_differences", "num_bytes", "is_refused"),
    [(False, 9, True), (False, 7, True), (True, 9, True), (True, 7, False)],
)
def test_a_link_that_carried_something_else_than_planned_ends_the_run(
    sends_differences: bool, num_bytes: int, is_refused: bool
) -> None:
    """Differences may be fewer bytes than whole weights, and never more."""
    cluster = Cluster(msgspec.structs.replace(GRPO, sends_differences=sends_differences))
    cluster.adjust = lambda reply: (
        msgspec.structs.replace(reply, num_bytes={"trainer-0>rollout-0": 8})
        if isinstance(reply, TransfersPlanned | Refitted)
        else reply
    )
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    counted = {"trainer-0>rollout-0": num_bytes}
    cluster.adjust = lambda reply: (
        msgspec.structs.replace(reply, num_bytes=counted) if isinstance(reply, Refitted) else reply
    )
    cluster.run_until(RunPhase.FINISHED)
    what = (
        f"rollout-0 failed while refitting: {num_bytes} bytes were counted on trainer-0>rollout-0, where 8 were planned"
    )
    assert str(cluster.done[-1].error) == (what if is_refused else "None")  # type: ignore[union-attr]


def test_an_engine_lost_after_an_interrupt_is_not_replaced() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    interrupt(cluster)
    assert lose(cluster, "rollout-1") == []
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1]


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_interrupted_while_training_finishes_saves_and_commits_the_step() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    assert interrupt(cluster) == []
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0, 1]
    assert cluster.done[-2:] == [PublishCheckpoint(step=1), FinishRun(outcome="interrupted")]


def test_interrupted_while_generating_abandons_the_step_and_saves_the_one_before() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    cluster.run_until(RunPhase.GENERATING)
    assert cluster.tables.step == 2
    cluster.pending.clear()
    assert all(isinstance(a, DispatchCommand) and isinstance(a.command, SaveCheckpoint) for a in interrupt(cluster))
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.done[-2:] == [PublishCheckpoint(step=1), FinishRun(outcome="interrupted")]
    assert cluster.commits() == [0, 1]


def test_interrupted_before_anything_was_trained_just_ends() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    assert only_finish(interrupt(cluster)).outcome == "interrupted"


def test_interrupted_twice_ends_at_once() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    interrupt(cluster)
    assert only_finish(interrupt(cluster)).outcome == "interrupted"


@pytest.mark.parametrize("phase", [RunPhase.VALIDATING, RunPhase.REFITTING, RunPhase.SAVING])
def test_interrupted_in_a_later_phase_loses_nothing(phase: RunPhase) -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, validate_at_start=False))
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    cluster.run_until(RunPhase.GENERATING)
    cluster.run_until(phase)
    if phase is RunPhase.VALIDATING:
        cluster.pending.clear()  # abandoned: their answers no longer count
    interrupt(cluster)
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [1, 2]
    assert [a.step for a in cluster.done if isinstance(a, PublishCheckpoint)] == [2]
    assert cluster.done[-1] == FinishRun(outcome="interrupted")


def test_the_scheduler_needs_no_torch_and_no_sockets() -> None:
    code = "import sys, tandem.coordinator.scheduler; print([m for m in ('torch', 'zmq') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- samples that cannot be fetched ----------------------------------------------------------------------------------


def miss(cluster: Cluster, **processes: str) -> list[Action]:
    """Have every rank answer that it could not train: the last one names engines."""
    ranks = [action for action in cluster.pending if isinstance(action, SentBatch)]
    assert len(ranks) > 1
    cluster.pending = [action for action in cluster.pending if action not in ranks]
    actions: list[Action] = []
    for rank in ranks:
        lacks = {name.replace("_", "-"): why for name, why in processes.items()} if rank is ranks[-1] else {}
        reply = SamplesMissing(command_id=rank.command_id, step=rank.step, rollouts=lacks)
        actions += cluster.give(ProcessReplied(now=cluster.now, process=rank.process, reply=reply))
    return actions


def test_what_trainers_cannot_fetch_is_made_again_and_nothing_else() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    before = {a.process: a.groups for a in cluster.commands if isinstance(a, DispatchPrompts) and a.purpose == "train"}
    actions = miss(cluster, rollout_1="nobody answers")
    assert DiscardSamples(step=1, purpose="train", groups=before["rollout-1"]) in actions
    assert TellUser(text="samples of step 1 are missing and are made again: rollout-1: nobody answers") in actions
    again = [a for a in actions if isinstance(a, DispatchPrompts)]
    assert [(a.process, a.groups) for a in again] == [("rollout-1", before["rollout-1"])]
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == list(range(GRPO.last_step + 1))
    trained = [a for a in cluster.commands if isinstance(a, SentBatch) and a.step == 1]
    assert len(trained) == 2 * GRPO.expected["trainer"]


def test_an_engine_that_is_lost_with_its_samples_makes_them_again_once_it_is_replaced() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    batches = [action for action in cluster.pending if isinstance(action, SentBatch)]
    lose(cluster, "rollout-0")
    cluster.pending = [action for action in cluster.pending if action not in batches] + batches
    miss(cluster, rollout_0="nobody answers")
    assert cluster.tables.phase is RunPhase.GENERATING
    replace(cluster, "rollout-0")
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == list(range(GRPO.last_step + 1))


def miss_three_times(cluster: Cluster, **missing: str) -> list[Action]:
    """Have trainers say three times in a row that they cannot use samples; return what the last one leads to."""
    for _ in range(2):
        cluster.run_until(RunPhase.TRAINING)
        miss(cluster, **missing)
    cluster.run_until(RunPhase.TRAINING)
    return miss(cluster, **missing)


def test_an_engine_whose_samples_cannot_be_used_three_times_is_replaced_and_the_next_one_ends_the_run() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    why = "its samples could not be used 3 times in a row: gone"
    assert ReplaceEngine(process="rollout-1", reason=why) in miss_three_times(cluster, rollout_1="gone")
    replace(cluster, "rollout-1")
    finish = only_finish(miss_three_times(cluster, rollout_1="gone"))
    assert isinstance(finish.error, ServiceLost)
    assert str(finish.error) == f"rollout-1 failed while generating: {why}; processes were replaced 1 times before"


def test_samples_that_could_be_used_between_begin_the_count_anew() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    for _ in range(2):
        for _ in range(2):
            cluster.run_until(RunPhase.TRAINING)
            miss(cluster, rollout_1="gone")
        cluster.run_until(RunPhase.TRAINING)
        cluster.run_until(RunPhase.REFITTING)
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == list(range(GRPO.last_step + 1))


def test_where_the_samples_of_all_engines_cannot_be_used_none_is_to_blame() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    finish = only_finish(miss_three_times(cluster, rollout_0="gone", rollout_1="gone"))
    assert str(finish.error) == (
        "coordinator failed while training step 1: samples of all engines could not be used 3 times in a row: gone"
    )


def fail(cluster: Cluster, process: str, error: str) -> list[Action]:
    """Have a member fail at its first piece of work, for a reason of its own."""
    work = [a for a in cluster.pending if a.process == process and isinstance(a, DispatchPrompts | SentBatch)]
    cluster.pending.remove(work[0])
    failed = Failed(command_id=work[0].command_id, phase="working", error=error, expected=False, traceback="line 1")
    return cluster.give(CommandErred(now=cluster.now, process=process, failed=failed))


def test_an_engine_that_fails_for_a_reason_of_its_own_is_replaced_once() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, max_replacements=5))
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    why = "it failed while working: OSError: too many open files"
    assert ReplaceEngine(process="rollout-1", reason=why) in fail(cluster, "rollout-1", "OSError: too many open files")
    replace(cluster, "rollout-1")
    cluster.run_until(RunPhase.GENERATING)
    while not any(a.process == "rollout-1" and isinstance(a, DispatchPrompts) for a in cluster.pending):
        cluster.answer_next()
    finish = only_finish(fail(cluster, "rollout-1", "OSError: too many open files"))
    assert isinstance(finish.error, CommandFailed)
    assert not finish.error.is_final
    assert str(finish.error) == "rollout-1 failed while working: OSError: too many open files\nline 1"


def test_a_run_goes_on_without_what_an_engine_failed_at() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    fail(cluster, "rollout-1", "OSError: too many open files")
    cluster.pending = [action for action in cluster.pending if action.process != "rollout-1"]
    replace(cluster, "rollout-1")
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == list(range(GRPO.last_step + 1))


def test_a_trainer_that_fails_for_a_reason_of_its_own_ends_the_term_alone() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    finish = only_finish(fail(cluster, "trainer-1", "OSError: too many open files"))
    assert isinstance(finish.error, CommandFailed)
    assert not finish.error.is_final


def test_a_loss_does_not_count_any_more_after_a_while() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, max_replacements=1, replacement_window_s=100.0))
    cluster.join_all()
    for _ in range(3):
        cluster.run_until(RunPhase.GENERATING)
        lose(cluster, "rollout-1")
        replace(cluster, "rollout-1")
        cluster.now += 101.0
    cluster.run_until(RunPhase.GENERATING)
    lose(cluster, "rollout-1")
    replace(cluster, "rollout-1")
    cluster.run_until(RunPhase.GENERATING)
    finish = only_finish(cluster.give(ProcessLost(now=cluster.now, process="rollout-0", reason="gone")))
    assert str(finish.error) == "rollout-0 failed while generating: gone; processes were replaced 1 times before"


def test_interrupted_while_samples_are_missing_abandons_the_step() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    cluster.run_until(RunPhase.TRAINING)
    cluster.give(StopRequested(now=cluster.now))
    miss(cluster, rollout_1="gone")
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [0]
    (finish,) = (action for action in cluster.done if isinstance(action, FinishRun))
    assert finish.outcome == "interrupted"


def test_recorded_samples_that_do_not_come_are_fetched_again_three_times() -> None:
    cluster = Cluster(msgspec.structs.replace(SFT, expected={"trainer": 2}))
    cluster.join_all()
    for _ in range(2):
        cluster.run_until(RunPhase.TRAINING)
        said = TellUser(text="samples of step 1 are missing and are fetched again: record: nobody answers")
        assert said in miss(cluster, record="nobody answers")
    assert cluster.tables.phase is RunPhase.TRAINING
    finish = only_finish(miss(cluster, record="nobody answers"))
    assert str(finish.error) == (
        "coordinator failed while training step 1: samples are missing: record: nobody answers (3 times in this step)"
    )


# --- stores of samples that are full ---------------------------------------------------------------------------------


class Stored(Cluster):
    """A cluster in which every sample takes ten tokens."""

    def size_of(self, drawn: DrawPrompts, group: int) -> GroupSize:
        return GroupSize(num_samples=1, num_tokens=10)

    def result(self, group: int, sample: int) -> SampleScored:
        return msgspec.structs.replace(super().result(group, sample), num_tokens=10)


def test_a_full_store_holds_up_new_samples_until_others_are_trained_on() -> None:
    """Of five groups of ten tokens rollout-0 has three; with an age of one it would begin those of the next step."""
    cluster = Stored(
        msgspec.structs.replace(GRPO, max_trajectory_age_steps=1, max_stored_tokens=40, validate_at_start=False)
    )
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    asked = sorted((a.process, a.step, a.groups) for a in cluster.commands if isinstance(a, DispatchPrompts))
    assert asked == [
        ("rollout-0", 1, (0, 2, 4)),
        ("rollout-0", 2, (0,)),
        ("rollout-1", 1, (1, 3)),
        ("rollout-1", 2, (1, 3)),
    ]
    said = [a.text for a in cluster.done if isinstance(a, TellUser)]
    assert said == [
        "rollout-0 generates no more before samples are trained on: it keeps up to 40 tokens "
        "(policy.generation.max_stored_tokens)"
    ]
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.commits() == [1, 2, 3]
    assert cluster.done[-1] == FinishRun(outcome="finished")


def test_a_step_that_no_store_can_keep_ends_the_run() -> None:
    cluster = Stored(msgspec.structs.replace(GRPO, max_stored_tokens=29))
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    while cluster.pending:
        cluster.answer_next()
    finish = only_finish(cluster.give(TimePassed(now=cluster.now + 0.1)))
    assert str(finish.error) == (
        "rollout-0 failed while generating: it can keep 29 tokens, and a step needs more before it can be trained on: "
        "raise policy.generation.max_stored_tokens, or have more engines"
    )


def test_a_run_in_which_nobody_is_asked_for_anything_ends_with_an_error() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(RunPhase.GENERATING)
    cluster.tables.requests.drop_all_but()  # a mistake in the books: no answer counts any more
    assert cluster.give_unchecked(TimePassed(now=cluster.now + 1)) == []
    assert cluster.give_unchecked(TimePassed(now=cluster.now + 10)) == []
    (finish,) = cluster.give_unchecked(TimePassed(now=cluster.now + 12))
    assert isinstance(finish, FinishRun)
    assert str(finish.error).startswith(
        "coordinator failed while step 1, generating: no request is pending, 0 rollout groups wait, and no rule"
    )


def test_deadlines_of_closed_requests_are_forgotten_and_those_of_others_kept() -> None:
    requests = PendingRequests(now=0.0)
    first = requests.open("trainer-0", RunPhase.TRAINING, 10.0)["command_id"]
    pending = {requests.open(f"rollout-{index}", RunPhase.RECORDING, 50.0 + index)["command_id"] for index in range(5)}
    for index in range(5000):
        closed = requests.open("rollout-0", RunPhase.RECORDING, 3600.0 + index)["command_id"]
        requests.close(closed)
        assert len(requests._deadlines) < 100, "while the first is pending"
    assert requests.overdue() is None
    requests.now = 10.5
    overdue = requests.overdue()
    assert overdue is not None
    assert overdue.command_id == first
    requests.close(first)
    assert requests.overdue() is None
    for index, command_id in enumerate(sorted(pending)):
        requests.now = 50.5 + index
        overdue = requests.overdue()
        assert overdue is not None
        assert overdue.command_id == command_id
        requests.close(command_id)
