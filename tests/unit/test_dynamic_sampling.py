"""Dynamic sampling: a step generates until enough groups teach something, and trains on the first of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from cluster_harness import GRPO, Cluster, SentBatch, lose, replace, result
from data_harness import character_tokenizer, data_config
from samples_harness import finished, records_of

from tandem.common.messages import SampleScored
from tandem.config import Config
from tandem.config.schema import AdvEstimator, GrpoConfig, RewardScaling, RewardShaping
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.algorithms.rewards import has_spread
from tandem.coordinator.forecast.plan_json import steps
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import DispatchPrompts, FinishRun
from tandem.coordinator.scheduler.requests import RunPhase
from tandem.coordinator.scheduler.spec import DynamicSampling, EngineBalance

SHAPE = msgspec.structs.replace(
    GRPO,
    num_groups=3,
    validate_every=0,
    validate_at_start=False,
    save_every=0,
    dynamic_sampling=DynamicSampling(num_groups=4, max_batches=3),
)


class Sampling(Cluster):
    """A cluster in which the samples of some groups differ."""

    num_samples = 2

    def __init__(self, useful: Sequence[int], balance: EngineBalance | None = None) -> None:
        shape = msgspec.structs.replace(SHAPE, balance=balance)
        super().__init__(shape)
        self.plan = Scheduler(shape, now=0.0, is_informative=lambda samples: len({s.reward for s in samples}) > 1)
        self.useful = useful
        self.join_all()
        self.run_until(RunPhase.GENERATING)

    def result(self, group: int, sample: int) -> SampleScored:
        return result(group, sample, float(sample * (group in self.useful)))

    def groups(self, step: int) -> list[int]:
        return sorted(g for a in self.commands if isinstance(a, DispatchPrompts) and a.step == step for g in a.groups)


@pytest.mark.parametrize(
    ("useful", "num_batches"), [([0, 1, 2], 1), ([0, 3, 4], 2), ([3, 5, 7], 2), ([0, 1, 11], 3), ([8, 9, 10, 11], 3)]
)
def test_a_step_generates_until_enough_groups_teach_something(useful: list[int], num_batches: int) -> None:
    cluster = Sampling(useful)
    cluster.run_until(RunPhase.TRAINING)
    assert cluster.groups(1) == list(range(4 * num_batches))
    # The next step begins anew.
    cluster.run_until(RunPhase.GENERATING)
    cluster.run_until(RunPhase.TRAINING)
    assert cluster.groups(2) == list(range(4 * num_batches))


def test_a_step_that_may_not_go_on_ends_the_run() -> None:
    cluster = Sampling([0, 11])
    cluster.run_until(RunPhase.FINISHED)
    assert cluster.groups(1) == list(range(12))
    assert not any(isinstance(a, SentBatch) for a in cluster.commands)
    (finish,) = (a for a in cluster.done if isinstance(a, FinishRun))
    assert finish.outcome == "failed"
    assert str(finish.error) == (
        "coordinator failed while generating: the samples of 3 x 4 prompts have given 2 groups whose rewards differ, "
        "and a step needs 3: the problems are too easy or too hard, or grpo.dynamic_sampling_max_gen_batches too low"
    )


def test_without_it_a_step_generates_once_whatever_comes() -> None:
    cluster = Sampling([])
    cluster.plan = Scheduler(msgspec.structs.replace(SHAPE, dynamic_sampling=None), now=0.0)
    cluster.pending, cluster.commands = [], []
    cluster.join_all()
    cluster.run_until(RunPhase.TRAINING)
    assert cluster.groups(1) == [0, 1, 2]


def test_samples_of_an_engine_that_is_lost_do_not_count() -> None:
    cluster = Sampling([0, 1, 2, 4])
    while not all(isinstance(action, DispatchPrompts) for action in cluster.pending):
        cluster.pending.sort(key=lambda action: isinstance(action, DispatchPrompts))
        cluster.answer_next()  # the version is verified
    first = next(a for a in cluster.pending if a.process == "rollout-0")
    assert isinstance(first, DispatchPrompts)
    cluster.send_samples(first)  # groups 0 and 2, and then it dies; its replacement makes others
    cluster.pending.remove(first)
    cluster.useful = [1, 5, 7]
    lose(cluster, "rollout-0")
    replace(cluster, "rollout-0")
    cluster.run_until(RunPhase.TRAINING)
    assert max(cluster.groups(1)) == 7


def test_engines_that_balance_their_work_go_on_with_a_second_batch() -> None:
    cluster = Sampling([4, 5, 6], balance=EngineBalance(width=1, timeout_s=None))
    cluster.run_until(RunPhase.TRAINING)
    assert cluster.groups(1) == list(range(8)), "each once"


def test_a_second_batch_is_shared_among_all_engines() -> None:
    cluster = Sampling([4, 5, 6])
    cluster.run_until(RunPhase.TRAINING)
    hands = [(a.process, a.groups) for a in cluster.commands if isinstance(a, DispatchPrompts)]
    assert hands == [("rollout-0", (0, 2)), ("rollout-1", (1, 3)), ("rollout-0", (4, 6)), ("rollout-1", (5, 7))]


# --- what teaches something ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "grpo", "expected"),
    [
        ([0.0, 1.0], GrpoConfig(), True),
        ([1.0, 1.0], GrpoConfig(), False),
        # Clamped they are the same, and lengths alone are no reason.
        ([1.0, 2.0], GrpoConfig(reward_scaling=RewardScaling(enabled=True)), False),
        (
            [1.0, 1.0],
            GrpoConfig(
                reward_shaping=RewardShaping(
                    enabled=True, max_response_length=2, overlong_buffer_length=2, overlong_buffer_penalty=1.0
                )
            ),
            False,
        ),
    ],
)
def test_groups_with_spread(rewards: list[float], grpo: GrpoConfig, expected: bool) -> None:
    assert has_spread(grpo, [result(0, i, reward) for i, reward in enumerate(rewards)]) is expected


def test_for_gdpo_it_is_the_components_that_differ() -> None:
    samples = [result(0, 0, 1.0, right=1.0, short=0.0), result(0, 1, 1.0, right=0.0, short=1.0)]
    assert not has_spread(GrpoConfig(), samples)
    assert has_spread(GrpoConfig(adv_estimator=AdvEstimator(name="gdpo")), samples)


# --- its data --------------------------------------------------------------------------------------------------------


def feed_config() -> Config:
    config = data_config()
    grpo = msgspec.structs.replace(
        config.grpo, use_dynamic_sampling=True, batch_multiplier=1.5, dynamic_sampling_max_gen_batches=3
    )
    return msgspec.structs.replace(config, grpo=grpo)


def test_a_step_draws_problems_of_its_own(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    config = feed_config()
    running = GrpoAlgorithm(config, character_tokenizer(config))
    assert config.grpo.num_prompts_per_batch == 6
    first = running.prompt_groups(1, "train", range(18))
    assert running.places is not None
    running.places.finish(1, 18)
    second = running.prompt_groups(2, "train", range(18))
    assert len({group.problem.problem_id for group in (*first, *second)}) == 36, "an epoch has 60"
    again = running.prompt_groups(1, "train", range(6, 12))
    assert again == first[6:12], "whatever a batch has, it does not depend on the batches before"


def test_the_first_groups_that_teach_something_are_trained_on(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    config = feed_config()
    running = GrpoAlgorithm(config, character_tokenizer(config))
    groups = running.prompt_groups(1, "train", range(12))
    messages = finished(groups, 1, "train")
    useless = {0, 2, 3, 4, 7}
    for i, message in enumerate(messages):
        (one,) = message.samples
        if one.group in useless:
            messages[i] = msgspec.structs.replace(message, samples=(msgspec.structs.replace(one, reward=0.0),))
    batch, metrics = running.batch(1, "train", records_of(groups, messages[::-1]))
    kept = [1, 5, 6, 8]
    assert batch.group_S.tolist() == [group for group in kept for _ in range(2)]
    assert batch.sample_S.tolist() == [0, 1] * 4
    assert batch.advantages_S.tolist() == [1, -1] * 4
    assert metrics["dynamic_sampling_num_gen_batches"] == 2
    assert metrics["dynamic_sampling_num_dropped_groups"] == 5
    assert metrics["dynamic_sampling_num_discarded_valid_samples"] == 2 * (7 - 4)
    assert metrics["reward"] == pytest.approx(7 / 24), "of all samples"
    assert metrics["filtered_reward"] == pytest.approx(1 / 2)


def test_the_plan_of_a_run_says_how_it_samples() -> None:
    assert list(steps(feed_config()))[:2] == [
        "4 prompts × 2 samples = 8 sequences, 1 optimizer step",
        "of each 6 prompts drawn, those with differing rewards are used; at most 3 draws",
    ]
