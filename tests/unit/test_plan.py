"""The coordinator's decisions: events in, actions out, no sockets."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from tandem.common.errors import CommandFailed, DeadlineExceeded, ServiceLost
from tandem.common.messages import (
    BuildEngine,
    BuildTrainer,
    CheckpointSaved,
    CommitVersion,
    EngineBuilt,
    Evaluated,
    Failed,
    Generated,
    InstallProgram,
    OpenRendezvous,
    PlanTransfers,
    ProgramInstalled,
    Refit,
    Refitted,
    RendezvousOpened,
    Reply,
    SaveCheckpoint,
    Trained,
    TrainerBuilt,
    TransfersPlanned,
    VersionCommitted,
)
from tandem.coordinator.plan import (
    Action,
    CommitStep,
    Deadlines,
    Dispatch,
    DispatchBatch,
    DispatchPrompts,
    Erred,
    Finish,
    Interrupted,
    Joined,
    Lost,
    Phase,
    PublishCheckpoint,
    Replied,
    RunShape,
    SynchronousPlan,
    Ticked,
)

GRPO = RunShape(
    algorithm="grpo",
    expected={"trainer": 2, "rollout": 2, "refit": 1},
    first_step=1,
    last_step=3,
    num_groups=5,
    num_validation_groups=3,
    validate_every=2,
    validate_at_start=True,
    save_every=2,
    resume_from="",
    checkpoint_folder="ck/{step}",
    allow_alias=True,
    deadlines=Deadlines(join=10, build=20, generate=30, train=40, evaluate=50, refit=5, save=60),
)
SFT = msgspec.structs.replace(GRPO, algorithm="sft", expected={"trainer": 1}, validate_at_start=False)


def answer(action: Dispatch | DispatchPrompts | DispatchBatch) -> Reply:
    """Return the reply of a process that does what it is told."""
    if isinstance(action, DispatchPrompts):
        return Generated(
            command_id=action.command_id,
            step=action.step,
            purpose=action.purpose,
            num_samples=1,
            num_tokens=1,
            seconds={},
        )
    if isinstance(action, DispatchBatch):
        if action.purpose == "validate":
            return Evaluated(command_id=action.command_id, step=action.step, metrics={})
        return Trained(
            command_id=action.command_id, step=action.step, version=action.step, metrics={}, seconds={}, digest=7
        )
    command_id = action.order.command_id
    match action.order:
        case OpenRendezvous():
            return RendezvousOpened(command_id=command_id, host="127.0.0.1", port=1234)
        case BuildTrainer():
            layout = f"{action.member} holds".encode()
            return TrainerBuilt(command_id=command_id, version=0, num_parameters=1, layout=layout, digest=3)
        case BuildEngine():
            return EngineBuilt(command_id=command_id, layout=f"{action.member} wants".encode())
        case PlanTransfers(destinations=destinations):
            programs = {engine: f"program of {engine}".encode() for engine in destinations}
            return TransfersPlanned(command_id=command_id, programs=programs, num_bytes={}, seconds=0.0)
        case InstallProgram():
            return ProgramInstalled(command_id=command_id, num_copies=1, num_bytes=1)
        case Refit(version=version):
            return Refitted(command_id=command_id, version=version, num_bytes=1, seconds=0.0, digest=6)
        case CommitVersion(version=version):
            return VersionCommitted(command_id=command_id, version=version)
        case SaveCheckpoint():
            return CheckpointSaved(command_id=command_id, num_bytes=1)


class Cluster:
    """Drives a plan with obedient processes; one second passes between an order and its answer."""

    def __init__(self, shape: RunShape) -> None:
        self.plan = SynchronousPlan(shape, now=0.0)
        self.now = 0.0
        self.pending: list[Dispatch | DispatchPrompts | DispatchBatch] = []
        self.done: list[CommitStep | PublishCheckpoint | Finish] = []
        self.orders: list[Dispatch | DispatchPrompts | DispatchBatch] = []

    def give(self, event: Any) -> list[Action]:
        actions = self.plan.handle(event)
        for action in actions:
            if isinstance(action, Dispatch | DispatchPrompts | DispatchBatch):
                self.pending.append(action)
                self.orders.append(action)
            else:
                self.done.append(action)
        return actions

    def join_all(self) -> None:
        for kind, count in self.plan.shape.expected.items():
            for index in reversed(range(count)):
                self.give(Joined(now=self.now, member=f"{kind}-{index}", kind=kind))

    def answer_next(self) -> None:
        action = self.pending.pop(0)
        self.now += 1.0
        self.give(Replied(now=self.now, member=action.member, reply=answer(action)))

    def run_until(self, phase: Phase) -> None:
        for _ in range(500):
            if self.plan.phase is phase:
                return
            self.answer_next()
        raise AssertionError(f"never reached {phase}")

    def commits(self) -> list[int]:
        return [action.step for action in self.done if isinstance(action, CommitStep)]


def kinds(cluster: Cluster) -> list[str]:
    """Name every order in turn, with the number of processes that got it."""
    names: list[str] = []
    for action in cluster.orders:
        if isinstance(action, Dispatch):
            names.append(type(action.order).__name__)
        else:
            names.append(f"{type(action).__name__}:{action.purpose}:{action.step}")
    compressed: list[str] = []
    for name in names:
        if compressed and compressed[-1].split(" ×")[0] == name:
            count = int(compressed[-1].split(" ×")[1])
            compressed[-1] = f"{name} ×{count + 1}"
        else:
            compressed.append(f"{name} ×1")
    return compressed


def test_a_whole_grpo_run_in_order() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.FINISHED)
    step = ["DispatchPrompts:train:{0} ×2", "DispatchBatch:train:{0} ×2", "Refit ×2", "CommitVersion ×1"]
    validate = "DispatchPrompts:validate:{0} ×2"
    expected = ["OpenRendezvous ×1", "BuildEngine ×2", "BuildTrainer ×2", "PlanTransfers ×1", "InstallProgram ×2"]
    expected += ["Refit ×2", "CommitVersion ×1", validate.format(0)]
    expected += [s.format(1) for s in step]
    expected += [s.format(2) for s in step] + [validate.format(2), "SaveCheckpoint ×2"]
    expected += [s.format(3) for s in step] + [validate.format(3), "SaveCheckpoint ×2"]
    assert kinds(cluster) == expected
    assert cluster.commits() == [0, 1, 2, 3]
    assert cluster.done[-1] == Finish(outcome="finished")
    published = [i for i, a in enumerate(cluster.done) if isinstance(a, PublishCheckpoint)]
    assert [cluster.done[i + 1] for i in published] == [a for a in cluster.done if isinstance(a, CommitStep)][2:]


def test_layouts_and_programs_reach_the_right_processes() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.REFITTING)
    orders = [a.order for a in cluster.orders if isinstance(a, Dispatch)]
    (planning,) = [o for o in orders if isinstance(o, PlanTransfers)]
    assert planning.sources == {"trainer-0": b"trainer-0 holds", "trainer-1": b"trainer-1 holds"}
    assert planning.destinations == {"rollout-0": b"rollout-0 wants", "rollout-1": b"rollout-1 wants"}
    installs = {
        a.member: a.order.program
        for a in cluster.orders
        if isinstance(a, Dispatch) and isinstance(a.order, InstallProgram)
    }
    assert installs == {"rollout-0": b"program of rollout-0", "rollout-1": b"program of rollout-1"}


def test_a_version_is_committed_with_every_digest() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.FINISHED)
    commits = [a.order for a in cluster.orders if isinstance(a, Dispatch) and isinstance(a.order, CommitVersion)]
    assert [c.version for c in commits] == [0, 1, 2, 3]
    assert commits[0].sources == {"trainer-0": 3, "trainer-1": 3}
    assert commits[1].sources == {"trainer-0": 7, "trainer-1": 7}
    assert commits[1].destinations == {"rollout-0": 6, "rollout-1": 6}


def test_every_group_goes_to_one_engine() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.TRAINING)
    hands = {a.member: a.groups for a in cluster.orders if isinstance(a, DispatchPrompts) and a.purpose == "train"}
    assert hands == {"rollout-0": (0, 2, 4), "rollout-1": (1, 3)}


def test_nothing_starts_before_everyone_is_here() -> None:
    cluster = Cluster(GRPO)
    for member in ("rollout-1", "refit-0", "trainer-1", "rollout-0"):
        assert cluster.give(Joined(now=0.0, member=member, kind=member.split("-")[0])) == []
    assert cluster.give(Joined(now=0.0, member="trainer-0", kind="trainer"))


def test_an_sft_run_has_no_engines() -> None:
    cluster = Cluster(SFT)
    cluster.join_all()
    cluster.run_until(Phase.FINISHED)
    assert kinds(cluster) == [
        "OpenRendezvous ×1",
        "BuildTrainer ×1",
        "DispatchBatch:train:1 ×1",
        "DispatchBatch:train:2 ×1",
        "DispatchBatch:validate:2 ×1",
        "SaveCheckpoint ×1",
        "DispatchBatch:train:3 ×1",
        "DispatchBatch:validate:3 ×1",
        "SaveCheckpoint ×1",
    ]
    assert cluster.commits() == [1, 2, 3]


def test_a_resumed_run_begins_after_its_checkpoint() -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, first_step=3, resume_from="ck/step_2"))
    cluster.join_all()
    cluster.run_until(Phase.FINISHED)
    builds = [a.order for a in cluster.orders if isinstance(a, Dispatch) and isinstance(a.order, BuildTrainer)]
    assert {b.checkpoint for b in builds} == {"ck/step_2"}
    refits = [a.order.version for a in cluster.orders if isinstance(a, Dispatch) and isinstance(a.order, Refit)]
    assert refits == [2, 2, 3, 3]
    assert cluster.commits() == [3]


def test_seconds_by_phase_add_up() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.FINISHED)
    for commit in (a for a in cluster.done if isinstance(a, CommitStep) and a.step > 0):
        parts = {name: s for name, s in commit.seconds.items() if name != "total"}
        assert sum(parts.values()) == pytest.approx(commit.seconds["total"])
        assert parts["generation"] == 2.0
        assert parts["refit"] == 3.0


# --- failure ---------------------------------------------------------------------------------------------------------


def only_finish(actions: list[Action]) -> Finish:
    (finish,) = actions
    assert isinstance(finish, Finish)
    return finish


def test_a_lost_process_ends_the_run_and_is_named() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.GENERATING)
    finish = only_finish(cluster.give(Lost(now=cluster.now, member="rollout-1", why="killed by SIGKILL")))
    assert isinstance(finish.error, ServiceLost)
    assert str(finish.error) == "rollout-1 failed while generating: killed by SIGKILL"
    assert cluster.plan.handle(Ticked(now=1e9)) == []


def test_a_failed_command_ends_the_run_with_the_processes_own_words() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.TRAINING)
    command_id = cluster.pending[0].command_id  # type: ignore[union-attr]
    failed = Failed(command_id=command_id, phase="training step 1", error="the reward is NaN", expected=True)
    finish = only_finish(cluster.give(Erred(now=cluster.now, member="trainer-0", failed=failed)))
    assert isinstance(finish.error, CommandFailed)
    assert str(finish.error) == "trainer-0 failed while training step 1: the reward is NaN"


@pytest.mark.parametrize(
    ("phase", "allowed", "doing"),
    [
        (Phase.BUILDING, 20, "building"),
        (Phase.REFITTING, 5, "refitting"),
        (Phase.GENERATING, 30, "generating"),
        (Phase.TRAINING, 40, "training"),
        (Phase.SAVING, 60, "saving a checkpoint"),
    ],
)
def test_every_phase_has_a_deadline(phase: Phase, allowed: float, doing: str) -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(phase)
    assert cluster.give(Ticked(now=cluster.now + allowed - 0.5)) == []
    finish = only_finish(cluster.give(Ticked(now=cluster.now + allowed + 0.5)))
    assert isinstance(finish.error, DeadlineExceeded)
    assert finish.error.phase == doing
    assert f"no answer within {allowed:g} s" in str(finish.error)


def test_joining_has_a_deadline_that_names_who_is_missing() -> None:
    cluster = Cluster(GRPO)
    cluster.give(Joined(now=0.0, member="trainer-0", kind="trainer"))
    finish = only_finish(cluster.give(Ticked(now=11.0)))
    assert "1 trainer and 2 rollout and 1 refit did not join within 10 s" in str(finish.error)


def test_an_answer_that_comes_twice_counts_once() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.TRAINING)
    first = cluster.pending.pop(0)
    reply = Replied(now=cluster.now, member=first.member, reply=answer(first))
    assert cluster.give(reply) == []
    assert cluster.give(reply) == []  # the other rank is still training
    assert cluster.plan.phase is Phase.TRAINING


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupt(cluster: Cluster) -> list[Action]:
    return cluster.give(Interrupted(now=cluster.now))


def test_interrupted_while_training_finishes_saves_and_commits_the_step() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.TRAINING)
    assert interrupt(cluster) == []
    cluster.run_until(Phase.FINISHED)
    assert cluster.done[-3:-1] == [PublishCheckpoint(step=1), cluster.done[-2]]
    assert cluster.commits() == [0, 1]
    assert cluster.done[-1] == Finish(outcome="interrupted")


def test_interrupted_while_generating_abandons_the_step_and_saves_the_one_before() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.TRAINING)
    cluster.run_until(Phase.GENERATING)
    assert cluster.plan.step == 2
    cluster.pending.clear()
    assert all(isinstance(a, Dispatch) and isinstance(a.order, SaveCheckpoint) for a in interrupt(cluster))
    cluster.run_until(Phase.FINISHED)
    assert cluster.done[-2:] == [PublishCheckpoint(step=1), Finish(outcome="interrupted")]
    assert cluster.commits() == [0, 1]


def test_interrupted_before_anything_was_trained_just_ends() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.GENERATING)
    assert only_finish(interrupt(cluster)).outcome == "interrupted"


def test_interrupted_twice_ends_at_once() -> None:
    cluster = Cluster(GRPO)
    cluster.join_all()
    cluster.run_until(Phase.TRAINING)
    interrupt(cluster)
    assert only_finish(interrupt(cluster)).outcome == "interrupted"


@pytest.mark.parametrize("phase", [Phase.VALIDATING, Phase.REFITTING, Phase.SAVING])
def test_interrupted_in_a_later_phase_loses_nothing(phase: Phase) -> None:
    cluster = Cluster(msgspec.structs.replace(GRPO, validate_at_start=False))
    cluster.join_all()
    cluster.run_until(Phase.TRAINING)
    cluster.run_until(Phase.GENERATING)
    cluster.run_until(phase)
    if phase is Phase.VALIDATING:
        cluster.pending.clear()  # abandoned: their answers no longer count
    interrupt(cluster)
    cluster.run_until(Phase.FINISHED)
    assert cluster.commits() == [1, 2]
    assert [a.step for a in cluster.done if isinstance(a, PublishCheckpoint)] == [2]
    assert cluster.done[-1] == Finish(outcome="interrupted")


def test_the_plan_needs_no_torch_and_no_sockets() -> None:
    code = "import sys, tandem.coordinator.plan; print([m for m in ('torch', 'zmq') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
