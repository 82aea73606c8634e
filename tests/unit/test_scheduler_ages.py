"""Runs of any age, answered in any order, with engines that are lost: every step is done, and nothing is too old."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from cluster_harness import GRPO, Cluster, SentBatch, interrupt, lose, replace

from tandem.common.messages import (
    CommitVersion,
    ConnectTransferGroup,
    CopyWeights,
    Failed,
    PlannedTransferGroup,
    Refit,
    ReportDigests,
    VersionCommitted,
)
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.events import (
    Action,
    CommandErred,
    CommitStep,
    DiscardSamples,
    DispatchBatch,
    DispatchCommand,
    DispatchPrompts,
    FinishRun,
    ProcessReplied,
    RecordRefit,
    TimePassed,
)
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.rules import recovery
from tandem.coordinator.scheduler.spec import DynamicSampling, EngineBalance
from tandem.coordinator.scheduler.steps import StepState

LAST_STEP = 6


class Aged(Cluster):
    """A cluster that notes how old the weights are that samples are made with, and what goes on at once."""

    def __init__(
        self,
        seed: int,
        age: int,
        balance: EngineBalance | None,
        dynamic: DynamicSampling | None = None,
        *,
        in_flight: bool = False,
        keeps_copy: bool = False,
    ) -> None:
        self.age = age
        self.random = random.Random(seed)
        self.ages: set[int] = set()
        self.generated_while_training = False
        self.refitted_in_flight = False
        self.trained_with_one_behind = False
        self.refitted_while_training = False
        self.copied: list[int] = []
        self.committed: set[int] = set()
        super().__init__(
            msgspec.structs.replace(
                GRPO,
                last_step=LAST_STEP,
                max_trajectory_age_steps=age,
                updates_in_flight=in_flight,
                keeps_copy=keeps_copy,
                max_replacements=100,
                balance=balance,
                dynamic_sampling=dynamic,
                validate_at_start=seed % 2 == 0,
            )
        )

    def give(self, event: object) -> list[Action]:
        actions = super().give(event)
        for action in actions:
            if isinstance(action, DispatchPrompts) and action.groups:
                version = self.tables.engines[action.process].version
                if action.purpose == "validate":
                    assert version == action.step, "validated are the step's own weights"
                    continue
                assert 0 <= action.step - 1 - version <= self.age, f"step {action.step}, version {version}"
                self.ages.add(action.step - 1 - version)
                self.generated_while_training |= self.tables.progress.state is StepState.TRAINING
            if isinstance(action, DispatchBatch) and action.purpose == "train":
                self.check_trained_on(action.step)
            if isinstance(action, DispatchCommand):
                self.check_order(action)
        return actions

    def check_order(self, action: DispatchCommand) -> None:
        """Assert that engines read what stands still, and that what is to be compared has digests."""
        engines = self.tables.engines
        match action.command:
            case Refit(version=version):
                self.refitted_in_flight |= self.tables.groups.num_in_flight(action.process) > 0
                self.refitted_while_training |= self.tables.progress.state is StepState.TRAINING
                if self.tables.spec.keeps_copy:
                    assert self.copied[-1] == version, "engines read the newest copy"
                    assert not any(
                        isinstance(a, DispatchCommand) and isinstance(a.command, CopyWeights) for a in self.pending
                    )
            case CopyWeights(version=version):
                assert not engines.num_having(EngineStatus.REFITTING)
                assert engines.num_verified == engines.num_having(EngineStatus.HOLDING)
                assert version == self.tables.step
                if version not in self.copied:
                    self.copied.append(version)
            case ReportDigests():
                assert not (self.tables.spec.keeps_copy and action.process.startswith("trainer")), "it trains"
            case CommitVersion(version=version, digests=digests):
                holders = [name for name in digests if name.startswith("rollout")]
                assert {*digests} == {"trainer-0", "trainer-1", *holders}
                assert all(digest.endswith(f" at {version}".encode()) for digest in digests.values())
                assert holders
                self.committed.add(version)
            case _:
                pass

    def check_trained_on(self, step: int) -> None:
        """Assert that what a step trains on is young enough and proven, and that no engine reads what it changes."""
        engines, of_step = self.tables.engines, self.tables.groups.of_step(step, "train")
        assert of_step is not None
        behind = [engines[name].version < self.tables.weights.version for name in engines.having(EngineStatus.HOLDING)]
        if self.tables.spec.keeps_copy and self.age:
            assert self.copied[-1] == step - 1
            assert not self.tables.requests.num_for(RunPhase.COPYING)
            self.refitted_while_training |= engines.num_having(EngineStatus.REFITTING) > 0
            self.trained_with_one_behind |= any(behind)
        else:
            assert not engines.num_having(EngineStatus.REFITTING)
            assert not any(behind)
        for group in of_step.groups:
            assert step - 1 - self.age <= group.oldest_version <= group.newest_version < step
            engine = engines[str(group.engine)]
            assert group.newest_version < engine.version or engine.is_verified

    def run(self, *, chance_of_loss: float = 0.0) -> None:
        self.join_all()
        absent: list[str] = []
        for _ in range(5000):
            if self.tables.phase is RunPhase.FINISHED:
                return
            if absent and (not self.pending or self.random.random() < 0.2):
                replace(self, absent.pop())
            elif self.tables.steps.has_started and not absent and self.random.random() < chance_of_loss:
                absent.append(f"rollout-{self.random.randrange(2)}")
                lose(self, absent[0])
            else:
                self.pending.insert(0, self.pending.pop(self.random.randrange(len(self.pending))))
                self.answer_next()
        raise AssertionError(f"the run stands still in step {self.tables.step}, {self.tables.phase.value}")


@pytest.mark.parametrize("balance", [None, EngineBalance(width=2, timeout_s=None)])
@pytest.mark.parametrize(
    ("age", "keeps_copy"), [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
)
@pytest.mark.parametrize("chance_of_loss", [0.0, 0.03])
@pytest.mark.parametrize("in_flight", [False, True])
def test_every_step_is_done_once_with_samples_that_are_young_enough(
    age: int, keeps_copy: bool, balance: EngineBalance | None, chance_of_loss: float, in_flight: bool
) -> None:
    ages, overlaps, refitted = set(), False, False
    with_one_behind, while_training = False, False
    for seed in range(12):
        cluster = Aged(seed, age, balance, in_flight=in_flight, keeps_copy=keeps_copy)
        cluster.run(chance_of_loss=chance_of_loss)
        assert cluster.commits() == list(range(seed % 2, LAST_STEP + 1))
        assert cluster.done[-1] == FinishRun(outcome="finished")
        trained = [a.step for a in cluster.commands if isinstance(a, SentBatch) and a.process == "trainer-0"]
        assert trained == list(range(1, LAST_STEP + 1))
        ages |= cluster.ages
        overlaps |= cluster.generated_while_training
        refitted |= cluster.refitted_in_flight
        with_one_behind |= cluster.trained_with_one_behind
        while_training |= cluster.refitted_while_training
        assert cluster.copied == (list(range(LAST_STEP + 1)) if keeps_copy else [])
        assert max(cluster.committed) == LAST_STEP
    assert while_training == keeps_copy
    if age > 1 and not in_flight:
        assert with_one_behind == keeps_copy
    assert refitted == (age > 0 and in_flight)
    assert max(ages) <= age
    assert overlaps == (age > 0), "generation waits for training exactly in synchronous runs"
    if age:
        assert max(ages) > 0


@pytest.mark.parametrize("age", [0, 1])
def test_dynamic_sampling_draws_more_for_the_step_in_progress(age: int) -> None:
    for seed in range(6):
        cluster = Aged(seed, age, None, DynamicSampling(num_groups=4, max_batches=5))
        cluster.tables.is_informative = lambda results: results[0].group % 2 == 0
        cluster.run()
        assert cluster.commits() == list(range(seed % 2, LAST_STEP + 1))
        for step in range(1, LAST_STEP + 1):
            drawn = {
                group
                for a in cluster.commands
                if isinstance(a, DispatchPrompts) and a.step == step and a.purpose == "train"
                for group in a.groups
            }
            assert drawn == set(range(12)), "of each four groups two are informative, and five are needed"


# --- one trouble at a time -------------------------------------------------------------------------------------------

BALANCED = EngineBalance(width=8, timeout_s=None)


def begun(age: int = 1, *, in_flight: bool = False, balance: EngineBalance | None = BALANCED, **over: Any) -> Aged:
    """A run in its first training step; engines generate for the next, and nothing is validated unless asked for."""
    cluster = Aged(0, age, balance, in_flight=in_flight)
    quiet: dict[str, Any] = {"validate_every": 0, "validate_at_start": False, "save_every": 0}
    spec = msgspec.structs.replace(cluster.tables.spec, **quiet | over)
    cluster.__dict__.update(Cluster(spec).__dict__)
    cluster.join_all()
    of_this_step = lambda action: no_generation(action) or action.step == 1  # noqa: E731
    until(cluster, lambda: cluster.tables.progress.state is StepState.TRAINING, of_this_step)
    assert cluster.tables.step == 1
    return cluster


def until(cluster: Cluster, holds: Callable[[], bool], answers: Callable[[Any], bool] = lambda action: True) -> None:
    """Answer what may be answered, the oldest first, until something holds."""
    for _ in range(1000):
        if holds():
            return
        at = next(i for i, action in enumerate(cluster.pending) if answers(action))
        cluster.pending.insert(0, cluster.pending.pop(at))
        cluster.answer_next()
    raise AssertionError("it never came to hold")


def is_order(action: Any, kind: type[object]) -> bool:
    return isinstance(action, DispatchCommand) and isinstance(action.command, kind)


def orders_to(cluster: Cluster, process: str, kind: type[object], since: int = 0) -> list[Any]:
    found = [a for a in cluster.commands[since:] if isinstance(a, DispatchCommand) and a.process == process]
    return [a.command for a in found if isinstance(a.command, kind)]


def no_generation(action: Any) -> bool:
    return not isinstance(action, DispatchPrompts)


def no_step(action: Any) -> bool:
    return not isinstance(action, SentBatch)


def finishes(cluster: Cluster) -> None:
    until(cluster, lambda: cluster.tables.phase is RunPhase.FINISHED)
    assert cluster.done[-1] == FinishRun(outcome="finished")
    assert [step for step in cluster.commits() if step] == list(range(1, LAST_STEP + 1))


def differ_while_training(cluster: Aged) -> list[Action]:
    """Have the weights of rollout-1 found wrong during the second step; return what follows from it."""
    late = lambda action: not is_order(action, ReportDigests) or action.process.startswith("trainer")  # noqa: E731
    until(cluster, lambda: cluster.tables.step == 2 and cluster.tables.progress.state is StepState.TRAINING, late)
    until(cluster, lambda: any(is_order(a, CommitVersion) for a in cluster.pending), no_step)
    (commit,) = [a for a in cluster.pending if is_order(a, CommitVersion)]
    cluster.pending.remove(commit)
    reply = VersionCommitted(
        command_id=commit.command.command_id, version=1, differing={"rollout-1": "q_proj"}, digest=9
    )
    return cluster.give(ProcessReplied(now=cluster.now, process="refit-0", reply=reply))


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_engine_whose_weights_are_wrong_waits_for_the_end_of_the_step(in_flight: bool) -> None:
    cluster = begun(in_flight=in_flight)
    differ_while_training(cluster)
    since = len(cluster.commands)
    until(cluster, lambda: not cluster.tables.requests.num_for(RunPhase.GENERATING), no_step)
    assert cluster.tables.progress.state is StepState.TRAINING
    assert orders_to(cluster, "rollout-1", Refit, since) == [], "the weights that it needs are not there"
    until(cluster, lambda: bool(orders_to(cluster, "rollout-1", Refit, since)))
    assert orders_to(cluster, "rollout-1", Refit, since)[0].version == 2
    finishes(cluster)


def test_what_an_engine_with_wrong_weights_generates_is_given_up() -> None:
    cluster = begun(balance=None)
    late = lambda action: no_generation(action) or action.process == "rollout-0"  # noqa: E731
    until(cluster, lambda: cluster.tables.groups.num_in_flight("rollout-1") > 0, late)
    recovery.quarantine(cluster.tables, cluster.tables.engines["rollout-1"], "testing", "wrong")
    stops, *_ = [a for a in cluster.give(TimePassed(now=cluster.now)) if isinstance(a, DispatchPrompts)]
    assert (stops.process, stops.groups) == ("rollout-1", ())
    generating = [a.command_id for a in cluster.commands if isinstance(a, DispatchPrompts) and a.groups]
    assert stops.cancel_before > max(generating)
    finishes(cluster)


def test_trouble_with_a_version_does_not_count_against_the_next() -> None:
    cluster = begun()
    for version in (1, 2, 3):
        until(cluster, lambda v=version: v in {command.version for command in orders_to(cluster, "rollout-1", Refit)})  # type: ignore[misc]
        (refit,) = [a for a in cluster.pending if is_order(a, Refit) and a.process == "rollout-1"]
        cluster.pending.remove(refit)
        failed = Failed(command_id=refit.command.command_id, phase="refitting", error="partial", expected=True)
        cluster.give(CommandErred(now=cluster.now, process="rollout-1", failed=failed))
    finishes(cluster)
    told = [a for a in cluster.done if isinstance(a, RecordRefit) and a.quarantined]
    assert [(a.version, a.quarantined) for a in told] == [(v, {"rollout-1": "partial"}) for v in (1, 2, 3)]


def test_all_engines_may_be_lost_while_a_step_trains() -> None:
    cluster = begun()
    for engine in ("rollout-0", "rollout-1"):
        lose(cluster, engine)
    until(cluster, lambda: 1 in cluster.commits())
    assert cluster.tables.phase is RunPhase.GENERATING, "the step that trained is done"
    assert not cluster.pending
    for engine in ("rollout-0", "rollout-1"):
        replace(cluster, engine)
    finishes(cluster)


def test_an_engine_lost_before_it_has_finished_what_it_has_holds_nobody_up() -> None:
    cluster = begun()
    others = lambda action: no_generation(action) or action.process == "rollout-0"  # noqa: E731
    until(cluster, lambda: cluster.tables.engines["rollout-0"].version == 1, others)
    until(cluster, lambda: not cluster.tables.requests.num_for(RunPhase.REFITTING, RunPhase.VERIFYING), others)
    assert cluster.tables.engines["rollout-1"].version == 0
    assert not cluster.tables.weights.may_step, "rollout-1 is still to read them"
    lose(cluster, "rollout-1")
    assert cluster.tables.weights.may_step
    until(cluster, lambda: 2 in cluster.commits())
    replace(cluster, "rollout-1")
    finishes(cluster)


def test_an_engine_that_never_finishes_what_it_has_is_named() -> None:
    """Where none may be replaced."""
    cluster = begun(max_replacements=0)
    others = lambda action: no_generation(action) or action.process == "rollout-0"  # noqa: E731
    stands_still = lambda: not any(map(others, cluster.pending))  # noqa: E731
    until(cluster, stands_still, others)
    assert cluster.tables.engines["rollout-0"].version == 1
    asked_at = cluster.now
    cluster.give(TimePassed(now=asked_at + 2 * GRPO.deadlines.generate))  # of this batch, and of the one before
    finish = cluster.done[-1]
    assert isinstance(finish, FinishRun)
    assert str(finish.error) == "rollout-1 failed while generating: no answer within 60 s"


@pytest.mark.parametrize("age", [0, 3])
def test_each_batch_that_is_asked_for_at_once_has_its_time(age: int) -> None:
    cluster = begun(age)
    allowed = {a.step: a.deadline_s for a in cluster.commands if isinstance(a, DispatchPrompts)}
    assert allowed == {1 + ahead: (1 + ahead) * GRPO.deadlines.generate for ahead in range(age + 1)}


def test_validation_comes_before_what_later_steps_need() -> None:
    cluster = begun(2, validate_every=2, balance=EngineBalance(width=1, timeout_s=None))
    until(cluster, lambda: cluster.tables.progress.state is StepState.VALIDATING)
    since = len(cluster.commands)
    until(cluster, lambda: 2 in cluster.commits())
    asked = [a.purpose for a in cluster.commands[since:] if isinstance(a, DispatchPrompts)]
    num_waiting = 3 - sum(isinstance(a, DispatchPrompts) and a.purpose == "validate" for a in cluster.commands[:since])
    assert asked[:num_waiting] == ["validate"] * num_waiting
    assert "train" in asked, "and they get what room is left"
    finishes(cluster)


def test_a_store_that_is_full_while_an_engine_comes_back_ends_no_run() -> None:
    cluster = begun(balance=None, max_stored_tokens=8)
    lose(cluster, "rollout-1")
    until(cluster, lambda: not cluster.pending)
    assert cluster.tables.full == {"rollout-0": None}
    assert cluster.give(TimePassed(now=cluster.now)) == []
    replace(cluster, "rollout-1")
    finishes(cluster)


@pytest.mark.parametrize("what", ["lost", "fails"])
def test_after_an_interrupt_no_proof_is_waited_for(what: str) -> None:
    cluster = begun()
    late = lambda action: not is_order(action, ReportDigests) or action.process.startswith("trainer")  # noqa: E731
    until(cluster, lambda: cluster.tables.step == 2 and cluster.tables.progress.state is StepState.TRAINING, late)
    interrupt(cluster)
    (verify,) = [a for a in cluster.pending if is_order(a, ReportDigests) and a.process == "rollout-1"]
    if what == "lost":
        lose(cluster, "rollout-1")
    else:
        cluster.pending.remove(verify)
        failed = Failed(command_id=verify.command.command_id, phase="verifying", error="no memory", expected=True)
        cluster.give(CommandErred(now=cluster.now, process="rollout-1", failed=failed))
    until(cluster, lambda: cluster.tables.phase is RunPhase.FINISHED)
    assert cluster.done[-1] == FinishRun(outcome="interrupted")
    assert cluster.commits() == [1, 2]


def test_a_proof_is_of_the_process_that_was_asked_for_it() -> None:
    cluster = begun(in_flight=True)
    is_commit = lambda action: is_order(action, CommitVersion)  # noqa: E731
    until(cluster, lambda: any(map(is_commit, cluster.pending)), no_generation)
    lose(cluster, "rollout-1")
    replace(cluster, "rollout-1")
    engine = cluster.tables.engines["rollout-1"]
    others = lambda action: no_generation(action) and not is_commit(action)  # noqa: E731
    until(cluster, lambda: engine.status is EngineStatus.HOLDING, others)
    until(cluster, lambda: not any(map(is_commit, cluster.pending)), is_commit)
    assert cluster.tables.engines["rollout-0"].is_verified
    assert not engine.is_verified, "it was another process that was found right"
    finishes(cluster)


def test_a_mesh_is_connected_when_nobody_is_in_a_step() -> None:
    """A step may take longer than a connection has time for."""
    transfer_group = PlannedTransferGroup(name="to rollout-1", members=("trainer-0", "rollout-1"))
    cluster = begun(balance=None)
    planned = cluster.tables.transfers.plan
    assert planned is not None
    cluster.tables.transfers.plan = msgspec.structs.replace(planned, transfer_groups=(transfer_group,))
    since = len(cluster.commands)
    lose(cluster, "rollout-1")
    replace(cluster, "rollout-1")
    stands_still = lambda: not any(map(no_step, cluster.pending))  # noqa: E731
    until(cluster, stands_still, no_step)
    assert cluster.tables.progress.state is StepState.TRAINING
    assert orders_to(cluster, "rollout-1", ConnectTransferGroup, since) == []
    until(cluster, lambda: len(orders_to(cluster, "rollout-1", ConnectTransferGroup, since)) == 1)
    finishes(cluster)


def test_groups_of_weights_that_are_too_old_are_made_again_and_counted() -> None:
    cluster = begun(balance=None)
    until(cluster, lambda: cluster.tables.step == 3)
    command = next(a for a in cluster.pending if isinstance(a, DispatchPrompts) and a.groups and a.step >= 3)
    cluster.begun_with[command.command_id] = command.step - 1 - cluster.age - 1
    finishes(cluster)
    commits = [a for a in cluster.done if isinstance(a, CommitStep)]
    assert sum(a.metrics["groups_too_old"] for a in commits) == len(command.groups)
    again = [a for a in cluster.commands if isinstance(a, DispatchPrompts) and a.step == command.step]
    assert sorted(g for a in again for g in a.groups) == sorted([*range(5), *command.groups])
    discarded = [a for a in cluster.done if isinstance(a, DiscardSamples)]
    assert discarded == [DiscardSamples(step=command.step, purpose="train", groups=command.groups)]
