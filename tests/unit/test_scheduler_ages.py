"""Runs of any age, answered in any order, with engines that are lost: every step is done, and nothing is too old."""

from __future__ import annotations

import random

import msgspec
import pytest
from cluster_harness import GRPO, Cluster, lose, replace

from tandem.common.messages import Refit
from tandem.coordinator.scheduler.engines import Status
from tandem.coordinator.scheduler.events import Action, Dispatch, DispatchBatch, DispatchPrompts, Finish
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.spec import Balance, DynamicSampling

LAST_STEP = 6


class Aged(Cluster):
    """A cluster that notes how old the weights are that samples are made with, and what goes on at once."""

    def __init__(
        self,
        seed: int,
        age: int,
        balance: Balance | None,
        dynamic: DynamicSampling | None = None,
        *,
        in_flight: bool = False,
    ) -> None:
        self.age = age
        self.random = random.Random(seed)
        self.ages: set[int] = set()
        self.generated_while_training = False
        self.refitted_in_flight = False
        super().__init__(
            msgspec.structs.replace(
                GRPO,
                last_step=LAST_STEP,
                max_trajectory_age_steps=age,
                updates_in_flight=in_flight,
                max_replacements=100,
                balance=balance,
                dynamic_sampling=dynamic,
            )
        )

    def give(self, event: object) -> list[Action]:
        actions = super().give(event)
        for action in actions:
            if isinstance(action, DispatchPrompts):
                version = self.plan.publication.engines[action.member].version
                if action.purpose == "validate":
                    assert version == action.step, "validated are the step's own weights"
                    continue
                assert 0 <= action.step - 1 - version <= self.age, f"step {action.step}, version {version}"
                self.ages.add(action.step - 1 - version)
                self.generated_while_training |= self.plan.progress.is_training
            if isinstance(action, DispatchBatch) and action.purpose == "train":
                self.check_trained_on(action.step)
            if isinstance(action, Dispatch) and isinstance(action.order, Refit):
                self.refitted_in_flight |= self.plan.groups.num_in_flight(action.member) > 0
        return actions

    def check_trained_on(self, step: int) -> None:
        """Assert that what a step trains on is young enough and proven, and that no engine reads what it changes."""
        publication, of_step = self.plan.publication, self.plan.groups.of_step(step, "train")
        assert of_step is not None
        assert not publication.engines.num_having(Status.REFITTING)
        for group in of_step.groups:
            assert step - 1 - self.age <= group.oldest_version <= group.newest_version < step
            engine = publication.engines[str(group.engine)]
            assert group.newest_version < engine.version or engine.is_attested

    def run(self, *, chance_of_loss: float = 0.0) -> None:
        self.join_all()
        absent: list[str] = []
        for _ in range(5000):
            if self.plan.phase is Phase.FINISHED:
                return
            if absent and (not self.pending or self.random.random() < 0.2):
                replace(self, absent.pop())
            elif self.plan._has_started and not absent and self.random.random() < chance_of_loss:
                absent.append(f"rollout-{self.random.randrange(2)}")
                lose(self, absent[0])
            else:
                self.pending.insert(0, self.pending.pop(self.random.randrange(len(self.pending))))
                self.answer_next()
        raise AssertionError(f"the run stands still in step {self.plan.step}, {self.plan.phase.value}")


@pytest.mark.parametrize("balance", [None, Balance(width=2, timeout_s=None)])
@pytest.mark.parametrize("age", [0, 1, 2])
@pytest.mark.parametrize("chance_of_loss", [0.0, 0.03])
@pytest.mark.parametrize("in_flight", [False, True])
def test_every_step_is_done_once_with_samples_that_are_young_enough(
    age: int, balance: Balance | None, chance_of_loss: float, in_flight: bool
) -> None:
    ages, overlaps, refitted = set(), False, False
    for seed in range(12):
        cluster = Aged(seed, age, balance, in_flight=in_flight)
        cluster.run(chance_of_loss=chance_of_loss)
        assert cluster.commits() == list(range(LAST_STEP + 1))
        assert cluster.done[-1] == Finish(outcome="finished")
        trained = [a.step for a in cluster.orders if isinstance(a, DispatchBatch) and a.member == "trainer-0"]
        assert trained == list(range(1, LAST_STEP + 1))
        ages |= cluster.ages
        overlaps |= cluster.generated_while_training
        refitted |= cluster.refitted_in_flight
    assert refitted == (age > 0 and in_flight)
    assert max(ages) <= age
    assert overlaps == (age > 0), "generation waits for training exactly in synchronous runs"
    if age:
        assert max(ages) > 0


@pytest.mark.parametrize("age", [0, 1])
def test_dynamic_sampling_draws_more_for_the_step_in_progress(age: int) -> None:
    for seed in range(6):
        cluster = Aged(seed, age, None, DynamicSampling(num_groups=4, max_batches=5))
        cluster.plan._is_informative = lambda results: results[0].group % 2 == 0
        cluster.run()
        assert cluster.commits() == list(range(LAST_STEP + 1))
        for step in range(1, LAST_STEP + 1):
            drawn = {
                group
                for a in cluster.orders
                if isinstance(a, DispatchPrompts) and a.step == step and a.purpose == "train"
                for group in a.groups
            }
            assert drawn == set(range(12)), "of each four groups two are informative, and five are needed"
